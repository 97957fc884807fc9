"""train: one draft layer, unrolled like serving."""

import json
import tempfile
from pathlib import Path

from flytekit import Cache, task
from flytekit.types.directory import FlyteDirectory

from eagle3.config.training import TrainConfig
from eagle3.files import files_digest
from workflows.flyte import store
from workflows.flyte.interfaces import DraftCheckpoint, DraftVocab, HiddenStateShards, Target
from workflows.flyte.live import AttemptCheckpoint, TrainingDeck
from workflows.flyte.pods import DECK, HUB, TRAINER, on_pod, trainer_pod
from workflows.flyte.recipe import Recipe
from workflows.flyte.stage import stage

CACHE = Cache(version="3", ignored_inputs=("states", "vocab", "target", "init_from", "recipe"))


@task(cache=CACHE, **TRAINER, **DECK, **HUB)
@stage
def train_draft(
    states: HiddenStateShards,
    states_digest: str,
    vocab: DraftVocab,
    vocab_digest: str,
    target: Target,
    target_digest: str,
    init_from: str,
    init_digest: str,
    train: TrainConfig,
    recipe: Recipe,
) -> DraftCheckpoint:
    """Train in processes of their own; a run that was killed resumes from its checkpoint, here and in a pod.

    The cache key has `train`, which decides the draft; `recipe.train` also says how to train.
    """
    from eagle3.training import launch
    from eagle3.training.checkpoint import CHECKPOINT_NAME
    from eagle3.training.loop import METRICS

    how = recipe.train
    assert train == how.settings_of_result(), "the key would be another draft's"
    store.share_credentials()
    target_dir = target.directory.download()
    digests = [states_digest, vocab_digest, target_digest, init_digest]
    key = store.digest_of_digests([CACHE.version, *digests, train.model_dump_json()])
    with tempfile.TemporaryDirectory() as init_dir, store.resumable_dir("train_draft", key) as out:
        if init_digest:
            _fetch_initial(init_from, init_digest, target_dir, states.layer_ids, how, init_dir)
        checkpoint, deck = AttemptCheckpoint(out / CHECKPOINT_NAME), TrainingDeck(out / METRICS)
        checkpoint.restore()

        def report() -> None:
            checkpoint.save()
            deck.show()

        job = launch.TrainJob(
            shard_dirs=[store.location(shard.directory) for shard in states.shards],
            vocab_path=vocab.file.download(),
            target_dir=target_dir,
            layer_ids=states.layer_ids,
            out_dir=str(out),
            cfg=how,
            init_dir=init_dir if init_digest else "",
        )
        try:
            launch.train_in_processes(job, report)
        finally:
            checkpoint.save()
        done = store.finish(out, "train_draft")
        (done / CHECKPOINT_NAME).unlink(missing_ok=True)
        deck.metrics_path = done / METRICS
    return DraftCheckpoint(
        FlyteDirectory(str(done)), files_digest(done / "draft.json", done / "draft.safetensors")
    )


def _fetch_initial(
    init_from: str, digest: str, target_dir: str, layer_ids: list[int], cfg: TrainConfig, out: str
) -> None:
    """Fetch and check the draft that training starts from."""
    from eagle3.draft.initial import check_initial, fetch_initial, warn_of_overrides

    target = json.loads((Path(target_dir) / "config.json").read_text())
    fetch_initial(init_from, digest, target, out)
    check_initial(out, target, layer_ids)
    warn_of_overrides(out, cfg)


train_draft_node = on_pod(train_draft, trainer_pod)
