"""The target as one directory: config, tokenizer and safetensors, or all but the weights."""

from pathlib import Path
from typing import Any

from flytekit import Cache, task
from flytekit.types.directory import FlyteDirectory

from workflows.flyte import store
from workflows.flyte.interfaces import Target, TargetRef
from workflows.flyte.pods import DATA, HUB, LIGHT, data_pod, on_pod
from workflows.flyte.recipe import Recipe
from workflows.flyte.stage import stage


@task(cache=Cache(version="3", ignored_inputs=("ref", "recipe")), **DATA, **HUB)
@stage
def fetch_target(ref: TargetRef, target_digest: str, recipe: Recipe) -> Target:
    from eagle3.targets.resolve import fetch_target
    from eagle3.targets.trust import sanitize
    from eagle3.targets.weights import check_target_dir

    store.share_credentials()
    out = store.new_dir("target")
    # The commit that the digest stands for.
    fetch_target(recipe.target.model_copy(update={"revision": ref.revision}), str(out))
    sanitize(out)
    return _as_target(ref, target_digest, out, check_target_dir(out))


@task(cache=Cache(version="2", ignored_inputs=("ref", "recipe")), **LIGHT, **HUB)
@stage
def fetch_tokenizer(ref: TargetRef, target_digest: str, recipe: Recipe) -> Target:
    """The same target, its directory without weights: enough to prepare the data and to plan a run."""
    from eagle3.targets.resolve import fetch_tokenizer
    from eagle3.targets.trust import sanitize
    from eagle3.targets.weights import check_target_config, read_config

    store.share_credentials()
    out = store.new_dir("tokenizer")
    fetch_tokenizer(recipe.target.model_copy(update={"revision": ref.revision}), str(out))
    sanitize(out)
    config = read_config(out, ref.name)
    check_target_config(config, ref.name)
    return _as_target(ref, target_digest, out, config)


def _as_target(ref: TargetRef, target_digest: str, directory: Path, config: dict[str, Any]) -> Target:
    return Target(
        name=ref.name,
        revision=ref.revision,
        digest=target_digest,
        directory=FlyteDirectory(str(directory)),
        num_layers=config["num_hidden_layers"],
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
    )


fetch_target_node = on_pod(fetch_target, data_pod)
