"""The fan-out of extraction: shards that fail for good, room on the disk, places that another attempt
finds."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from flytekit import FlyteContextManager
from flytekit.core.context_manager import ExecutionState
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from eagle3.engine import engine as target_engine
from eagle3.engine.interface import EngineSettings
from eagle3.files import try_lock
from tests.helpers.flyte_runs import make_recipe
from workflows.flyte import store
from workflows.flyte.interfaces import HiddenStateShards, Target, TokenShard, TokenShards
from workflows.tasks import extract_hidden_states as extraction


@pytest.fixture
def shards(workplace: Path, tmp_path: Path) -> TokenShards:
    """Five shards whose files say their number; nothing reads them."""
    files = [tmp_path / f"shard-{i}.parquet" for i in range(5)]
    for i, file in enumerate(files):
        file.write_text(str(i))
    key = tmp_path.name
    return TokenShards(
        [TokenShard(i, FlyteFile(str(f)), 10, 100, 50, f"{key}-{i}") for i, f in enumerate(files)], key
    )


@pytest.fixture
def target(tmp_path: Path) -> Target:
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text("{}")
    return Target("t", "r", "target", FlyteDirectory(str(tmp_path / "target")), 4, 9, 8)


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Stands in for the engine, which is not what is tested: notes who asked, fails for the shards in
    `broken`."""
    seen: dict[str, Any] = {"broken": set(), "calls": []}

    def capture(settings: EngineSettings, shard_path: str, out: str, *_: Any) -> dict[str, Any]:
        number = int(Path(shard_path).read_text())
        seen["calls"].append((number, settings.tensor_parallel_size))
        if number in seen["broken"]:
            raise RuntimeError(f"no states of {number}")
        (Path(out) / "manifest.json").write_text(" " * 10_000)
        return {"rows": 10, "tokens": 100, "supervised_tokens": 50, "bytes": 7, "digest": f"states-{number}"}

    monkeypatch.setattr(target_engine, "capture", capture)
    return seen


def extract(shards: TokenShards, target: Target, **fanout: Any) -> HiddenStateShards:
    found: HiddenStateShards = extraction.extract_hidden_states(
        shards=shards,
        target=target,
        recipe=make_recipe(engine={"engine": "transformers"}, extract={"layer_ids": [1]}, fanout=fanout),
    )
    return found


@pytest.mark.parametrize("replicas", [1, 2, 3, 8])
def test_shards_come_back_in_order_whatever_the_number_of_lanes(
    shards: TokenShards, target: Target, captured: dict[str, Any], replicas: int
) -> None:
    states = extract(shards, target, replicas=replicas)
    assert [s.digest for s in states.shards] == [f"states-{i}" for i in range(5)]
    assert [s.index for s in states.shards] == list(range(5))
    assert sorted(captured["calls"]) == [(i, 1) for i in range(5)]


def test_neither_servers_nor_gpus_are_in_a_key(
    shards: TokenShards, target: Target, captured: dict[str, Any]
) -> None:
    states = extract(shards, target, server_urls=["http://a", "http://b"])
    assert sorted(captured["calls"]) == [(i, 1) for i in range(5)]
    assert extract(shards, target, tensor_parallel_size=2) == states
    assert len(captured["calls"]) == 5


def test_a_shard_that_fails_for_good_ends_the_run_and_the_rest_is_kept(
    shards: TokenShards, target: Target, captured: dict[str, Any]
) -> None:
    captured["broken"] = {3}
    with pytest.raises(RuntimeError, match="no states of 3"):
        extract(shards, target, replicas=2)
    captured["broken"], captured["calls"] = set(), []
    assert len(extract(shards, target, replicas=2).shards) == 5
    assert sorted(number for number, *_ in captured["calls"]) == [3, 4]


def test_what_does_not_fit_on_the_disk_is_refused_with_the_numbers(
    shards: TokenShards,
    target: Target,
    captured: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    extract(shards, target)
    assert "states of 500 tokens as bf16: at most 0.000 GB before compression" in capsys.readouterr().out
    monkeypatch.setattr(store, "free_bytes", lambda: 100)
    extract(shards, target)  # all of it is there already
    monkeypatch.setattr(store, "taken", lambda *_: 100)
    with pytest.raises(
        ValueError,
        match=r"states of 500 tokens .* has 0\.000 GB free: free some, train on fewer prompts, or set",
    ):
        extract(shards, target)


@pytest.fixture
def pod(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Flyte's context as `pyflyte-execute` makes it in a pod."""
    with ExitStack() as stack:

        def enter(prefix: str) -> None:
            ctx = FlyteContextManager.current_context()
            access = ctx.file_access.__class__(str(tmp_path / "sandbox"), prefix)
            state = ctx.execution_state.with_params(mode=ExecutionState.Mode.TASK_EXECUTION)
            stack.enter_context(
                FlyteContextManager.with_context(ctx.with_file_access(access).with_execution_state(state))
            )

        yield enter


def test_every_attempt_and_execution_finds_the_same_place(pod: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    places = set()
    for attempt in (
        "s3://bucket/raw/a7/f1-n1-dn0-0",
        "s3://bucket/raw/xx/f1-n1-dn0-1",
        "s3://bucket/raw/b2/f2-n1-dn0-0/",
    ):
        pod(attempt)
        with store.keyed_uri("states", "key") as place:
            places.add(place)
    assert places == {"s3://bucket/raw/eagle3/states-key"}
    monkeypatch.setenv("EAGLE3_STORE", "gs://other/store/")
    with store.keyed_uri("states", "key") as place:
        assert place == "gs://other/store/eagle3/states-key"


def test_a_second_process_waits_for_a_place(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = []

    def release(_: float) -> None:
        waits.append(1)
        lock.release()

    with store.keyed_uri("states", "busy") as place:
        pass
    lock = try_lock(f"{place}.lock")
    assert lock is not None
    monkeypatch.setattr(store.time, "sleep", release)
    with store.keyed_uri("states", "busy") as again:
        assert again == place
    assert waits == [1]
