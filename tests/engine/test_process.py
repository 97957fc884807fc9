"""The engine's process and its lifetime, with the transformers engine: no vLLM here."""

import json
import multiprocessing
import os
import re
import shutil
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
from eagle3.engine.engine import capture, generate, regenerate, run, stop
from eagle3.engine.interface import EngineSettings, Generation, Speculation
from eagle3.engine.process import Failure
from eagle3.engine.progress import Watch
from eagle3.errors import EngineDied
from eagle3.regenerate.answers import Sampling
from eagle3.shards.hidden_states import read_hidden_states
from eagle3.shards.tokens import TokenRow, read_token_shard, write_token_shard
from tests.engine.test_capture import random_rows, states_of
from tests.helpers.engine_jobs import engine_pid, is_running, print_to_stdout
from tests.helpers.factories import greedy_answer, tiny_target

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in /proc"),
]
ENGINE = EngineConfig(engine="transformers", dtype="float32", max_model_len=64, max_num_seqs=4)
END = 2


@pytest.fixture(scope="module", autouse=True)
def _engines() -> Iterator[None]:
    yield
    stop()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    path = tmp_path_factory.mktemp("target")
    model = tiny_target("llama", vocab_size=13, eos_token_id=END).float()
    model.save_pretrained(path)
    return path, model


def prompts() -> list[list[int]]:
    return [[t % 13 for t in row.token_ids] for row in random_rows(9)]


def answer(path: Path, engine: EngineConfig = ENGINE, temperature: float = 0.0, seed: int = 0) -> Generation:
    return generate(EngineSettings.from_dirs(path, engine), prompts(), Sampling(temperature, 1.0, 12), seed)


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
    first = engine_pid()
    answer(path, temperature=0.7, seed=1)
    assert engine_pid() == first
    answer(path, EngineConfig(**{**ENGINE.model_dump(), "max_num_seqs": 2}))
    assert engine_pid() != first
    assert not is_running(first)


def test_sampling_repeats_with_its_seed_on_a_warm_engine_too(target: tuple[Path, PreTrainedModel]) -> None:
    path, _ = target
    first = answer(path, temperature=1.0, seed=1).answers
    other = answer(path, temperature=1.0, seed=2).answers
    assert answer(path, temperature=1.0, seed=1).answers == first != other


def test_captured_states_are_the_models_whatever_the_batch(
    tmp_path: Path, target: tuple[Path, PreTrainedModel]
) -> None:
    path, model = target
    rows = [TokenRow(str(i), "test", p, [True] * len(p)) for i, p in enumerate(prompts())]
    write_token_shard(tmp_path / "shard", rows)
    extract = ExtractConfig(encoding="fp32")
    settings = EngineSettings.from_dirs(path, ENGINE, layer_ids=[1])
    manifest = capture(settings, tmp_path / "shard", tmp_path / "out", extract, {"a": "b"})
    assert (
        manifest["info"] | {"a": "b", "layer_ids": [1], "last_layer_id": 4, "dtype": "float32"}
        == manifest["info"]
    )
    for row, stored in zip(rows, read_hidden_states(tmp_path / "out"), strict=True):
        states, _ = states_of(model, row)
        # Rows of one batch are padded to one width: the same sums in another order.
        torch.testing.assert_close(stored.aux[:, 0], states[:, 0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(stored.last, states[:-1, 1], rtol=1e-4, atol=1e-4)


def test_a_killed_capture_resumes_after_its_last_finished_chunk(
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
        settings = EngineSettings.from_dirs(path, ENGINE, layer_ids=[1])
        return capture(settings, tmp_path / "shard", out, extract, {})

    whole = capture_to(tmp_path / "whole")

    def kill_after_the_first_chunk() -> None:
        while not list((tmp_path / "parts").glob("chunk-*.json")):
            time.sleep(0.001)
        os.kill(engine_pid(), signal.SIGKILL)

    threading.Thread(target=kill_after_the_first_chunk, daemon=True).start()
    with pytest.raises(EngineDied, match=r"killed \(signal 9\).*max_num_seqs"):
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


def test_a_killed_regeneration_asks_only_for_the_missing_answers(
    tmp_path: Path, target: tuple[Path, PreTrainedModel]
) -> None:
    path, _ = target
    rows = [
        TokenRow(f"o:{i}", "test", [(i + t) % 13 for t in range(1 + i % 20)], [False] * (1 + i % 20))
        for i in range(60)
    ]
    write_token_shard(tmp_path / "shard", rows)
    cfg = RegenerateConfig(temperature=0.0, max_new_tokens=12)

    def answer_to(out: str) -> dict[str, Any]:
        # One row at a time, so that no answer depends on what it is batched with.
        engine = ENGINE.model_copy(update={"max_num_seqs": 1})
        settings = EngineSettings.from_dirs(path, engine)
        return regenerate(settings, tmp_path / "shard", tmp_path / out, str(tmp_path / f"log-{out}"), cfg)

    def logged() -> list[str]:
        logs = sorted(
            (tmp_path / "log-parts").glob("*.jsonl"), key=lambda f: f.stat().st_ctime_ns
        )  # each attempt's own
        return [line for log in logs for line in log.read_text().splitlines()]

    def kill_after_some_answers() -> None:
        while len(logged()) < 20:
            time.sleep(0.001)
        os.kill(engine_pid(), signal.SIGKILL)

    whole = answer_to("whole")
    assert whole["counts"]["requested"] == 60
    threading.Thread(target=kill_after_some_answers, daemon=True).start()
    with pytest.raises(EngineDied, match=r"killed \(signal 9\)"):
        answer_to("parts")
    kept = logged()
    assert 20 <= len(kept) < 60
    assert not (tmp_path / "parts").exists()
    assert answer_to("parts") == whole
    assert logged()[: len(kept)] == kept
    assert len(logged()) == 60
    assert read_token_shard(tmp_path / "parts") == read_token_shard(tmp_path / "whole")


def test_bad_calls_are_refused_before_an_engine_starts(
    tmp_path: Path, target: tuple[Path, PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = target
    monkeypatch.setattr(target_engine, "run", lambda *_: pytest.fail("an engine was started"))
    for tokens in ([], [1] * 64):
        with pytest.raises(ValueError, match=r"prompt 1 has \d+ tokens.*max_model_len"):
            generate(EngineSettings.from_dirs(path, ENGINE), [[1], tokens], Sampling(0.0, 1.0, 1))

    def try_capture(length: int, layer_ids: list[int]) -> None:
        write_token_shard(tmp_path / "shard", [TokenRow("long", "test", [1] * length, [True] * length)])
        settings = EngineSettings.from_dirs(path, ENGINE, layer_ids=layer_ids)
        capture(settings, tmp_path / "shard", tmp_path / "out", ExtractConfig(), {})

    with pytest.raises(ValueError, match=r"row long has 65 tokens.*max_model_len"):
        try_capture(65, [1])
    for layer_ids in ([], [5], [-1], [2, 1], [1, 1]):
        with pytest.raises(ValueError, match=r"within 0 … 4.*got " + re.escape(str(layer_ids))):
            try_capture(4, layer_ids)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000}))
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
    settings = EngineSettings.from_dirs(path, ENGINE, speculation=Speculation(str(tmp_path), 1))
    with pytest.raises(ValueError, match="temperature 0"):
        generate(settings, [[1]], Sampling(1.0, 1.0, 2))
    assert len(answer(path).answers) == 9


def test_the_call_after_an_idle_engine_was_killed_starts_another(
    target: tuple[Path, PreTrainedModel],
) -> None:
    path, _ = target
    answer(path)
    pid = engine_pid()
    os.kill(pid, signal.SIGKILL)
    while multiprocessing.active_children():
        time.sleep(0.01)
    assert len(answer(path).answers) == 9
    assert engine_pid() != pid


def test_an_interrupt_ends_a_long_job_at_once_and_the_next_call_works(
    target: tuple[Path, PreTrainedModel],
) -> None:
    path, _ = target
    answer(path)
    pid = engine_pid()
    timer = threading.Timer(2.0, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    began = time.monotonic()
    # A job of minutes. Where flytekit is imported, its handler exits.
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        generate(EngineSettings.from_dirs(path, ENGINE), [[1]] * 20_000, Sampling(0.0, 1.0, 60))
    took = time.monotonic() - began
    timer.join()
    assert 2.0 <= took < 7.0
    assert not is_running(pid)
    assert len(answer(path).answers) == 9


PARENT = """
import multiprocessing, sys, threading
from eagle3.config.engine import EngineConfig
from eagle3.engine.engine import generate
from eagle3.engine.interface import EngineSettings
from eagle3.regenerate.answers import Sampling
settings = EngineSettings.from_dirs(sys.argv[1], EngineConfig.model_validate_json(sys.argv[2]))
generate(settings, [[1]], Sampling(0.0, 1.0, 2))
print(multiprocessing.active_children()[0].pid, flush=True)
generate(settings, [[1]] * 20_000, Sampling(0.0, 1.0, 60))
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_engine_ends_in_the_middle_of_a_job_when_its_parent_ends(
    target: tuple[Path, PreTrainedModel], tmp_path: Path, number: signal.Signals
) -> None:
    """The parent is a script without a guard, as people write them: the engine's process must not run it again."""
    path, _ = target
    (tmp_path / "parent.py").write_text(PARENT)
    root = str(Path(target_engine.__file__).parents[2])
    parent = subprocess.Popen(
        [sys.executable, str(tmp_path / "parent.py"), str(path), ENGINE.model_dump_json()],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": root},
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    time.sleep(1)
    assert is_running(pid)
    parent.send_signal(number)
    parent.wait()
    deadline = time.monotonic() + 20
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not is_running(pid)


def test_what_the_engine_prints_is_not_in_the_parents_output(
    target: tuple[Path, PreTrainedModel], capfd: pytest.CaptureFixture[str]
) -> None:
    stop()  # the next one prints to the captured streams
    path, _ = target
    run(EngineSettings.from_dirs(path, ENGINE), print_to_stdout, Watch("print"))
    stop()
    assert "noise" not in capfd.readouterr().out


def test_the_engines_environment_is_its_own(target: tuple[Path, PreTrainedModel]) -> None:
    before = dict(os.environ)
    main = sys.modules["__main__"]
    stop()
    answer(target[0])
    assert dict(os.environ) == before
    assert sys.modules["__main__"] is main


def test_a_missing_engine_library_is_named_with_the_remedy(
    target: tuple[Path, PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    stop()
    monkeypatch.setattr("eagle3.engine.engine.find_spec", lambda name: None)
    settings = EngineSettings.from_dirs(target[0], EngineConfig(max_model_len=64))
    with pytest.raises(ValueError, match="vllm is not installed here; set engine.engine to transformers"):
        generate(settings, [[1]], Sampling(0.0, 1.0, 1))


def test_an_engine_that_needs_more_memory_or_other_settings_is_not_tried_again() -> None:
    short = Failure.from_error(torch.OutOfMemoryError("CUDA out of memory"))
    assert short.text.startswith("CUDA out of memory; lower engine.max_num_seqs")
    assert short.is_permanent
    assert Failure.from_error(ValueError("no room for the cache blocks")) == Failure(
        "no room for the cache blocks", True
    )
    assert Failure.from_error(NotImplementedError("no such layer")).is_permanent
    for error in (
        RuntimeError("Engine core initialization failed"),
        AssertionError(),
        ConnectionError("lost"),
    ):
        assert not Failure.from_error(error).is_permanent
    assert Failure.from_error(AssertionError()).text == "AssertionError()"
