"""The training task around its processes: nothing fetched whole, nothing lost by a kill, faults told apart,
curves shown live."""

import json
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flytekit.core.checkpointer import SyncCheckpoint
from flytekit.core.context_manager import FlyteContextManager
from flytekit.core.type_engine import TypeEngine
from flytekit.exceptions.system import FlyteUploadDataException
from flytekit.exceptions.user import FlyteRecoverableException
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from eagle3.config.training import TrainConfig
from eagle3.errors import RankDied
from eagle3.training import launch
from eagle3.training.launch import Preempted, TrainJob
from tests.helpers.flyte_runs import make_recipe, pod
from workflows.flyte import live, store
from workflows.flyte.interfaces import (
    DraftCheckpoint,
    DraftVocab,
    HiddenStateShard,
    HiddenStateShards,
    Target,
)
from workflows.tasks.train_draft import train_draft

Trainer = Callable[[TrainJob, Callable[[], None], Path], None]


@pytest.fixture(autouse=True)
def local_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EAGLE3_STORE", str(tmp_path / "store"))
    return tmp_path / "store"


def run(tmp_path: Path, shard_dir: str = "", **settings: Any) -> DraftCheckpoint:
    """The task's function on inputs that only the trainer would read, passed through Flyte's literals as
    between two pods."""
    (tmp_path / "target").mkdir(exist_ok=True)
    (tmp_path / "vocab.safetensors").touch()
    shard = HiddenStateShard(0, FlyteDirectory(shard_dir or str(tmp_path)), 1, 1, 1, 1, [1, 2, 3], "s")
    states = HiddenStateShards([shard], [1, 2, 3], "states")
    context = FlyteContextManager.current_context()
    literal = TypeEngine.to_literal(
        context, states, HiddenStateShards, TypeEngine.to_literal_type(HiddenStateShards)
    )
    made: DraftCheckpoint = train_draft.task_function(
        states=TypeEngine.to_python_value(context, literal, HiddenStateShards),
        states_digest="states",
        vocab=DraftVocab(FlyteFile(str(tmp_path / "vocab.safetensors")), 4, 1.0, "vocab"),
        vocab_digest="vocab",
        target=Target("t", "r", "target", FlyteDirectory(str(tmp_path / "target")), 4, 9, 8),
        target_digest="target",
        init_from="",
        init_digest="",
        train=TrainConfig(**settings).settings_of_result(),
        recipe=make_recipe(train=settings),
    )
    return made


def use(monkeypatch: pytest.MonkeyPatch, trainer: Trainer) -> list[TrainJob]:
    """Put `trainer` in place of the processes; returns the jobs that it gets."""
    jobs = []

    def train_in_processes(job: TrainJob, on_progress: Callable[[], None], every_s: float = 15.0) -> None:
        jobs.append(job)
        trainer(job, on_progress, Path(job.out_dir))

    monkeypatch.setattr(launch, "train_in_processes", train_in_processes)
    return jobs


def finish(out: Path) -> None:
    for name in ("draft.json", "draft.safetensors"):
        (out / name).write_text(name)
    (out / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 2.0}) + "\n")


def train_whole(job: TrainJob, on_progress: Callable[[], None], out: Path) -> None:
    (out / "checkpoint.safetensors").write_text("last")
    on_progress()
    finish(out)


def train_half_then_whole(job: TrainJob, on_progress: Callable[[], None], out: Path) -> None:
    """Dies with a checkpoint; goes on if it finds one."""
    checkpoint = out / "checkpoint.safetensors"
    if checkpoint.exists():
        assert checkpoint.read_text() == "half"
        finish(out)
        return
    checkpoint.write_text("half")
    raise RankDied("killed")


def test_a_remote_shard_is_named_and_not_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = use(monkeypatch, train_whole)
    monkeypatch.setattr(
        FlyteDirectory, "__fspath__", lambda self: pytest.fail("fetched") if self.remote_source else self.path
    )
    run(tmp_path, "s3://bucket/shard", seed=1)
    with pod(tmp_path):
        run(tmp_path, "s3://bucket/shard", seed=1)
    assert [job.shard_dirs for job in jobs] == [["s3://bucket/shard"]] * 2


def test_a_finished_run_leaves_an_output_of_its_own_without_the_checkpoint(
    tmp_path: Path, local_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, train_whole)
    first, second = run(tmp_path), run(tmp_path)
    assert first.directory.path != second.directory.path
    assert first.digest == second.digest
    for made in (first, second):
        assert {p.name for p in Path(made.directory.path).iterdir()} == {
            "draft.json",
            "draft.safetensors",
            "metrics.jsonl",
        }
    assert {str(p) for p in local_store.iterdir()} == {first.directory.path, second.directory.path}


def test_a_killed_local_run_goes_on_from_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = use(monkeypatch, train_half_then_whole)
    with pytest.raises(RuntimeError, match="killed"):
        run(tmp_path)
    with pytest.raises(RuntimeError, match="killed"):
        run(tmp_path, learning_rate=0.5)
    run(tmp_path, checkpoint_every=7)  # changes nothing that is learnt
    assert jobs[2].out_dir == jobs[0].out_dir != jobs[1].out_dir


def test_two_runs_of_one_key_at_once_share_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = []

    def train_while_another_does(job: TrainJob, on_progress: Callable[[], None], out: Path) -> None:
        if not inner:
            inner.append(job)
            inner.append(run(tmp_path))
        train_whole(job, on_progress, out)

    jobs = use(monkeypatch, train_while_another_does)
    outer = run(tmp_path)
    assert jobs[0].out_dir != jobs[1].out_dir
    assert outer.directory.path != inner[1].directory.path


def hold(name: str, key: str, locked: Any, release: Any) -> None:
    with store.resumable_dir(name, key):
        locked.set()
        release.wait(30)


def test_the_lock_of_a_process_ends_with_it(local_store: Path) -> None:
    fork = multiprocessing.get_context("fork")
    locked, release = fork.Event(), fork.Event()
    holder = fork.Process(target=hold, args=("x", "key", locked, release))
    holder.start()
    assert locked.wait(60)
    with store.resumable_dir("x", "key") as elsewhere:
        assert elsewhere != local_store / "x-key.unfinished"
    holder.kill()
    holder.join()
    with store.resumable_dir("x", "key") as mine:
        assert mine == local_store / "x-key.unfinished"


def test_an_attempt_goes_on_from_the_one_before_and_saves_for_the_one_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, train_half_then_whole)
    attempts = [str(tmp_path / f"attempt{i}") for i in range(3)]
    with (
        pod(tmp_path / "a", SyncCheckpoint(attempts[0])),
        pytest.raises(FlyteRecoverableException, match="killed"),
    ):
        run(tmp_path)
    assert Path(attempts[0], "checkpoint.safetensors").read_text() == "half"

    def die(job: TrainJob, on_progress: Callable[[], None], out: Path) -> None:
        assert (out / "checkpoint.safetensors").read_text() == "half"
        raise Preempted("a checkpoint was saved")

    use(monkeypatch, die)
    with (
        pod(tmp_path / "b", SyncCheckpoint(attempts[1], attempts[0])),
        pytest.raises(FlyteRecoverableException, match="was saved"),
    ):
        run(tmp_path)
    assert Path(attempts[1], "checkpoint.safetensors").read_text() == "half"
    use(monkeypatch, train_half_then_whole)
    with pod(tmp_path / "c", SyncCheckpoint(attempts[2], attempts[1])):
        made = run(tmp_path)
    assert not Path(made.directory.path, "checkpoint.safetensors").exists()


def test_an_attempt_after_one_that_saved_nothing_starts_afresh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    use(
        monkeypatch,
        lambda job, report, out: (found.append((out / "checkpoint.safetensors").exists()), finish(out)),
    )  # type: ignore[func-returns-value]
    (tmp_path / "empty").mkdir()
    for source in ("absent", "empty"):
        with pod(tmp_path / source, SyncCheckpoint(str(tmp_path / "to"), str(tmp_path / source))):
            run(tmp_path)
    with pod(tmp_path / "by hand"):
        run(tmp_path)
    assert found == [False, False, False]


class Uploads:
    """A checkpoint store that remembers what was uploaded and fails as often as told."""

    def __init__(self, failures: int = 0) -> None:
        self.saved: list[str] = []
        self.failures = failures

    def prev_exists(self) -> bool:
        return False

    def save(self, path: Path) -> None:
        if self.failures:
            self.failures -= 1
            raise FlyteUploadDataException("no route")
        assert path.name == "checkpoint.safetensors"
        self.saved.append(path.read_text())


def test_each_checkpoint_is_saved_once_and_a_failed_upload_is_made_up_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(job: TrainJob, on_progress: Callable[[], None], out: Path) -> None:
        for text in ("1", "22", "333"):
            part = out / "checkpoint.safetensors.part"
            part.write_text(text)
            part.replace(out / "checkpoint.safetensors")
            on_progress()
            on_progress()
        finish(out)

    use(monkeypatch, train)
    for failures, saved in ((0, ["1", "22", "333"]), (1, ["1", "22", "333"]), (2, ["22", "333"])):
        uploads = Uploads(failures)
        with pod(tmp_path / str(failures), uploads):
            run(tmp_path)
        assert uploads.saved == saved


def test_wrong_settings_fail_at_once_with_their_own_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(job: TrainJob, on_progress: Callable[[], None], out: Path) -> None:
        raise ValueError("lower train.validation_rows")

    use(monkeypatch, refuse)
    with pod(tmp_path, Uploads()), pytest.raises(ValueError, match="^lower train.validation_rows$"):
        run(tmp_path)


def test_the_deck_shows_curves_while_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deck, clock = tmp_path / "meta/deck.html", [100.0]
    (tmp_path / "meta").mkdir()
    monkeypatch.setattr(live.time, "monotonic", lambda: clock[0])
    line = {
        "loss_by_step": [3.0, 4.0, 5.0],
        "accuracy_by_step": [0.5, 0.4, float("nan")],
        "seconds_left": 120,
        "memory_bytes": 1 << 30,
    }

    def train(job: TrainJob, on_progress: Callable[[], None], out: Path) -> None:
        on_progress()
        assert "training" in deck.read_text()
        lines = "".join(json.dumps({"step": i + 1, **line}) + "\n" for i in range(20_000))
        (out / "metrics.jsonl").write_text(lines + '{"step": 20001, "lo')
        deck.unlink()
        clock[0] += 19
        on_progress()
        assert not deck.exists()
        clock[0] += 2
        on_progress()
        text = deck.read_text()
        assert "step 20,000, 2 minutes left" in text
        assert "Loss by TTT step" in text
        assert "<polyline" in text
        assert len(text) < 1_000_000
        finish(out)

    use(monkeypatch, train)
    with pod(tmp_path):
        run(tmp_path)
