"""The worker process and its lifetime, with the transformers engine: no vLLM here."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from eagle3.config.engine import EngineConfig, ExtractConfig, RegenerateConfig
from eagle3.engine import engine as target_engine
from eagle3.engine.engine import Generation, capture, close_engines, generate, play
from eagle3.engine.process import error_reply
from eagle3.shards.hidden_states import read_hidden_states
from eagle3.shards.tokens import TokenRow, read_token_shard, write_token_shard
from tests.engine.test_capture import random_rows, states_of
from tests.helpers.factories import greedy_answer, tiny_target

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in /proc")
ENGINE = EngineConfig(engine="transformers", dtype="float32", max_model_len=64, max_num_seqs=4)
END = 2


@pytest.fixture(scope="module", autouse=True)
def _engines() -> Iterator[None]:
    yield
    close_engines()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    path = tmp_path_factory.mktemp("target")
    model = tiny_target("llama", vocab_size=13, eos_token_id=END).float()
    model.save_pretrained(path)
    return path, model


def prompts() -> list[list[int]]:
    return [[t % 13 for t in row.token_ids] for row in random_rows(9)]


def answer(path: Path, engine: EngineConfig = ENGINE, temperature: float = 0.0, seed: int = 0) -> Generation:
    return generate(path, prompts(), engine, temperature=temperature, top_p=1.0, max_new_tokens=12, seed=seed)


def engine_pid() -> int:
    """The process that holds the engine: the only child of the worker."""
    assert target_engine._worker is not None
    worker = target_engine._worker.process.pid
    return int(Path(f"/proc/{worker}/task/{worker}/children").read_text().split()[0])


def test_greedy_answers_are_the_targets_own_and_end_with_its_end_token(
    target: tuple[Path, PreTrainedModel],
) -> None:
    path, model = target
    generation = answer(path)
    assert generation.seconds > 0
    assert generation.generated_tokens == sum(len(a.token_ids) for a in generation.answers)
    assert {a.finish_reason for a in generation.answers} == {"stop", "length"}
    for prompt, given in zip(prompts(), generation.answers, strict=True):
        assert (given.token_ids, given.finish_reason) == greedy_answer(model, prompt, 12, END)


def test_equal_settings_share_an_engine_and_other_settings_replace_it(
    target: tuple[Path, PreTrainedModel],
) -> None:
    path, _ = target
    answer(path)
    first, worker = engine_pid(), target_engine._worker
    answer(path, temperature=0.7, seed=1)
    assert engine_pid() == first
    answer(path, EngineConfig(**{**ENGINE.model_dump(), "max_num_seqs": 2}))
    assert engine_pid() != first
    assert not Path(f"/proc/{first}").exists()
    assert target_engine._worker is worker


def test_sampling_repeats_with_its_seed_on_a_warm_engine_too(target: tuple[Path, PreTrainedModel]) -> None:
    path, _ = target
    first, other = (
        answer(path, temperature=1.0, seed=1).answers,
        answer(path, temperature=1.0, seed=2).answers,
    )
    assert answer(path, temperature=1.0, seed=1).answers == first != other


def test_captured_states_are_the_models_whatever_the_batch(
    tmp_path: Path, target: tuple[Path, PreTrainedModel]
) -> None:
    path, model = target
    rows = [TokenRow(str(i), "test", p, [True] * len(p)) for i, p in enumerate(prompts())]
    write_token_shard(tmp_path / "shard", rows)
    extract = ExtractConfig(encoding="fp32")
    manifest = capture(path, tmp_path / "shard", tmp_path / "out", [1], ENGINE, extract, {"a": "b"})
    assert (
        manifest["info"] | {"a": "b", "layer_ids": [1], "last_layer_id": 4, "dtype": "float32"}
        == manifest["info"]
    )
    for row, stored in zip(rows, read_hidden_states(tmp_path / "out"), strict=True):
        states, _ = states_of(model, row)
        # Rows of one batch are padded to one width: the same sums in another order.
        torch.testing.assert_close(stored.aux[:, 0], states[:, 0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(stored.last, states[:-1, 1], rtol=1e-4, atol=1e-4)


def test_a_capture_that_was_killed_goes_on_behind_its_last_chunk(
    tmp_path: Path, target: tuple[Path, PreTrainedModel]
) -> None:
    path, _ = target
    rows = [
        TokenRow(str(i), "test", [(i + t) % 13 for t in range(20 + i % 30)], [True] * (20 + i % 30))
        for i in range(300)
    ]
    write_token_shard(tmp_path / "shard", rows)
    extract = ExtractConfig(encoding="fp32", chunk_bytes=100_000)

    def capture_to(out: Path) -> dict[str, Any]:
        return capture(path, tmp_path / "shard", out, [1], ENGINE, extract, {})

    whole = capture_to(tmp_path / "whole")

    def kill_after_the_first_chunk() -> None:
        while not list((tmp_path / "parts").glob("chunk-*.json")):
            time.sleep(0.001)
        os.kill(engine_pid(), signal.SIGKILL)

    threading.Thread(target=kill_after_the_first_chunk, daemon=True).start()
    with pytest.raises(RuntimeError, match=r"killed \(signal 9\)"):
        capture_to(tmp_path / "parts")
    noted = [json.loads(f.read_text())["entry"]["file"] for f in (tmp_path / "parts").glob("chunk-*.json")]
    kept = {tmp_path / "parts" / name: (tmp_path / "parts" / name).stat().st_mtime_ns for name in noted}
    assert 0 < len(kept) < len(whole["chunks"])
    again = capture_to(tmp_path / "parts")
    assert again["digest"] == whole["digest"]
    assert [c["sample_ids"] for c in again["chunks"]] == [c["sample_ids"] for c in whole["chunks"]]
    pairs = zip(read_hidden_states(tmp_path / "parts"), read_hidden_states(tmp_path / "whole"), strict=True)
    for row, expected in pairs:  # other rows in a batch, other last bits
        torch.testing.assert_close(row.aux, expected.aux, rtol=1e-4, atol=1e-4)
    assert {f: f.stat().st_mtime_ns for f in kept} == kept
    assert capture_to(tmp_path / "parts") == again


def test_a_play_that_was_killed_asks_only_for_what_is_missing(
    tmp_path: Path, target: tuple[Path, PreTrainedModel]
) -> None:
    path, _ = target
    rows = [
        TokenRow(f"o:{i}", "test", [(i + t) % 13 for t in range(1 + i % 20)], [False] * (1 + i % 20))
        for i in range(60)
    ]
    write_token_shard(tmp_path / "shard", rows)
    regenerate = RegenerateConfig(temperature=0.0, max_new_tokens=12)

    def play_to(out: str) -> dict[str, Any]:
        # One row at a time, so that no answer depends on what it is batched with.
        engine = ENGINE.model_copy(update={"max_num_seqs": 1})
        return play(
            path, tmp_path / "shard", tmp_path / out, str(tmp_path / f"log-{out}"), engine, regenerate
        )

    def logged() -> list[str]:
        logs = sorted(
            (tmp_path / "log-parts").glob("*.jsonl"), key=lambda f: f.stat().st_ctime_ns
        )  # each attempt's own
        return [line for log in logs for line in log.read_text().splitlines()]

    def kill_after_some_answers() -> None:
        while len(logged()) < 20:
            time.sleep(0.001)
        os.kill(engine_pid(), signal.SIGKILL)

    whole = play_to("whole")
    assert whole["counts"]["requested"] == 60
    threading.Thread(target=kill_after_some_answers, daemon=True).start()
    with pytest.raises(RuntimeError, match=r"killed \(signal 9\)"):
        play_to("parts")
    kept = logged()
    assert 20 <= len(kept) < 60
    assert not (tmp_path / "parts").exists()
    assert play_to("parts") == whole
    assert logged()[: len(kept)] == kept
    assert len(logged()) == 60
    assert read_token_shard(tmp_path / "parts") == read_token_shard(tmp_path / "whole")


def test_bad_calls_are_refused_before_an_engine_starts(
    tmp_path: Path, target: tuple[Path, PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = target
    monkeypatch.setattr(target_engine, "_run", lambda *_: pytest.fail("an engine was started"))
    for tokens in ([], [1] * 64):
        with pytest.raises(ValueError, match=r"prompt 1 has \d+ tokens.*max_model_len"):
            generate(path, [[1], tokens], ENGINE, temperature=0, top_p=1, max_new_tokens=1, seed=0)

    def try_capture(length: int, layer_ids: list[int]) -> None:
        write_token_shard(tmp_path / "shard", [TokenRow("long", "test", [1] * length, [True] * length)])
        capture(path, tmp_path / "shard", tmp_path / "out", layer_ids, ENGINE, ExtractConfig(), {})

    with pytest.raises(ValueError, match=r"row long has 65 tokens.*max_model_len"):
        try_capture(65, [1])
    for layer_ids in ([], [5], [-1], [2, 1], [1, 1]):
        with pytest.raises(ValueError, match=r"within 0 … 4.*got " + re.escape(str(layer_ids))):
            try_capture(4, layer_ids)
    monkeypatch.setattr(target_engine.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    with pytest.raises(
        ValueError,
        match=r"the states of 40 tokens need 0\.\d+ GB as bf16 .* 0\.000 GB are free there; free some",
    ):
        try_capture(40, [1])


def test_an_engines_error_arrives_as_its_own_message_and_the_next_call_works(
    tmp_path: Path, target: tuple[Path, PreTrainedModel]
) -> None:
    path, _ = target
    (tmp_path / "config.json").write_text('{"model_type": "nonesuch", "num_hidden_layers": 4}')
    with pytest.raises(ValueError, match="nonesuch"):
        answer(tmp_path)
    with pytest.raises(ValueError, match="temperature 0"):
        generate(
            path,
            [[1]],
            ENGINE,
            temperature=1.0,
            top_p=1,
            max_new_tokens=2,
            seed=0,
            draft_dir=tmp_path,
            num_speculative_tokens=1,
        )
    assert len(answer(path).answers) == 9


def test_a_killed_engine_is_reported_with_a_remedy_and_the_next_call_starts_another(
    target: tuple[Path, PreTrainedModel],
) -> None:
    path, _ = target
    answer(path)
    os.kill(engine_pid(), signal.SIGKILL)
    with pytest.raises(RuntimeError, match=r"killed \(signal 9\).*max_num_seqs"):
        answer(path)
    assert len(answer(path).answers) == 9


def test_an_interrupt_ends_a_long_job_at_once_and_the_next_call_works(
    target: tuple[Path, PreTrainedModel],
) -> None:
    path, _ = target
    answer(path)
    pids = [engine_pid(), target_engine._worker.process.pid]  # type: ignore[union-attr]
    timer = threading.Timer(2.0, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    began = time.monotonic()
    # A job of minutes. Where flytekit is imported, its handler exits.
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        generate(path, [[1]] * 20_000, ENGINE, temperature=0.0, top_p=1.0, max_new_tokens=60, seed=0)
    took = time.monotonic() - began
    timer.join()
    assert 2.0 <= took < 7.0  # end() waits ten seconds for a job that does not end
    assert not any(is_running(str(pid)) for pid in pids)
    assert len(answer(path).answers) == 9


def test_the_worker_ends_when_its_parent_is_killed(target: tuple[Path, PreTrainedModel]) -> None:
    path, _ = target
    script = (
        "import sys\nfrom eagle3.config.engine import EngineConfig\nfrom eagle3.engine import engine as e\n"
        f"cfg = EngineConfig(**{ENGINE.model_dump()})\n"
        f"e.generate({str(path)!r}, [[1]], cfg, temperature=0, top_p=1, max_new_tokens=2, seed=0)\n"
        "pid = e._worker.process.pid\nprint(pid, open(f'/proc/{pid}/task/{pid}/children').read(), flush=True)\nsys.stdin.read()"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(target_engine.__file__).parents[2])}
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    )
    assert parent.stdout is not None
    pids = parent.stdout.readline().split()
    assert len(pids) == 2
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 20
    while any(is_running(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(is_running(pid) for pid in pids)


def is_running(pid: str) -> bool:
    """True unless the process is gone or only waits for somebody to take its exit status."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_a_missing_engine_library_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    close_engines()
    monkeypatch.setattr("eagle3.engine.engine.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="vllm is not installed here; set engine.engine to transformers"):
        target_engine._ready_worker("vllm")


def test_an_engine_that_needs_more_memory_or_other_settings_is_not_tried_again() -> None:
    """ValueError at the caller; the rest, RuntimeError, may pass."""
    short = error_reply(torch.OutOfMemoryError("CUDA out of memory"))
    assert short["error"].startswith("CUDA out of memory; lower engine.max_num_seqs")
    over = [
        short,
        error_reply(ValueError("no room for the cache blocks")),
        error_reply(NotImplementedError("no such layer")),
    ]
    assert [reply["is_value_error"] for reply in over] == [True] * 3
    assert over[1]["error"] == "no room for the cache blocks"
    for error in (
        RuntimeError("Engine core initialization failed"),
        AssertionError(),
        ConnectionError("lost"),
    ):
        assert not error_reply(error)["is_value_error"]
    assert error_reply(AssertionError())["error"] == "AssertionError()"
