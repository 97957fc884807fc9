"""prepare: source rows to token shards."""

import json

from flytekit import Cache, task
from flytekit.types.file import FlyteFile

import images
from eagle3.config import DataConfig
from workflows import store
from workflows.interfaces import PreparedData, Target, TokenShard
from workflows.resources import DATA
from workflows.stage import stage


@task(container_image=images.CPU, cache=Cache(version="1", ignored_inputs=("prompts", "heldout", "target")), **DATA)
@stage
def prepare_data(
    prompts: FlyteFile,
    prompts_digest: str,
    heldout: FlyteFile,
    heldout_digest: str,
    target: Target,
    target_digest: str,
    data: DataConfig,
    regenerate: bool,
) -> PreparedData:
    """Tokenize all rows; with `regenerate` they are prompts that wait for an answer, else their last answer is trained on."""
    from eagle3.data.prepare import PreparedFile, prepare_shards

    out = store.new_dir("prepare_data")
    files = prepare_shards(prompts.download(), heldout.download(), target.directory.download(), data, regenerate, str(out))

    def shard(index: int, file: PreparedFile) -> TokenShard:
        counts = file.summary
        return TokenShard(index, FlyteFile(str(file.path)), counts.rows, counts.tokens, counts.supervised_tokens, counts.digest)

    shards = [shard(i, file) for i, file in enumerate(files.shards)]
    report = out / "report.json"
    report.write_text(json.dumps(files.report, indent=1))
    return PreparedData(shards, shard(0, files.heldout), FlyteFile(str(report)))
