"""prepare, where the shards exist already: the held-out prompts alone."""

from dataclasses import asdict

from flytekit import Cache, task
from flytekit.types.file import FlyteFile

from eagle3.config.data import DataConfig, SourceConfig
from workflows.flyte import store
from workflows.flyte.interfaces import Target, TokenShard
from workflows.flyte.pods import DATA
from workflows.flyte.recipe import Recipe
from workflows.flyte.stage import stage


@task(cache=Cache(version="3", ignored_inputs=("target", "recipe")), **DATA)
@stage
def prepare_heldout(
    heldout_digest: str, target: Target, target_digest: str, data: DataConfig, recipe: Recipe
) -> TokenShard:
    from eagle3.data.prepare import prepare_heldout

    out = store.new_dir("prepare_heldout")
    source = SourceConfig(path=store.fetch(recipe.heldout), name="heldout")
    made = prepare_heldout(source, target.directory.download(), data, out)
    return TokenShard(0, FlyteFile(str(made.path)), **asdict(made.summary))
