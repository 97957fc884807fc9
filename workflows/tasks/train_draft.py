"""train: one draft layer, unrolled like serving."""

from flytekit import Cache, task
from flytekit.types.directory import FlyteDirectory

import images
from eagle3.config import TrainConfig
from workflows import store
from workflows.interfaces import DraftCheckpoint, DraftVocab, HiddenStateShards, Target
from workflows.resources import TRAINER
from workflows.stage import stage


@task(container_image=images.GPU, cache=Cache(version="1", ignored_inputs=("states", "vocab", "target")), retries=3, **TRAINER)
@stage
def train_draft(
    states: HiddenStateShards,
    states_digest: str,
    vocab: DraftVocab,
    vocab_digest: str,
    target: Target,
    target_digest: str,
    train: TrainConfig,
) -> DraftCheckpoint:
    from eagle3.training import loop

    out = store.new_dir("train_draft")
    shard_dirs = [shard.directory.download() for shard in states.shards]
    loop.train(shard_dirs, vocab.file.download(), target.directory.download(), train, states.layer_ids, str(out))
    return DraftCheckpoint(FlyteDirectory(str(out)), store.file_digest(out / "draft.json", out / "draft.safetensors"))
