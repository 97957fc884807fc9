"""A real vLLM server against transformers: its answers and its refusals."""

import os
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import pytest
from transformers import PreTrainedModel

from eagle3.engine.server.client import KEY_VARIABLE
from eagle3.engine.server.engine import ServerEngine
from eagle3.regenerate.answers import Answer, Sampling
from tests.engine.test_capture_and_generate import CHUNKED, END, random_rows, save_target
from tests.helpers.factories import greedy_answer
from tests.helpers.server_engines import answers_of, server_engine

pytestmark = pytest.mark.engine

START_TIMEOUT_S = 180
# vLLM on a CPU spawns its engine, which then imports everything a second time: 47 s until the first answer. Forked, 22 s.
FORKING = """
import gc, multiprocessing, runpy
gc.disable()
from vllm.utils import system_utils
system_utils.get_mp_context = lambda: multiprocessing.get_context("fork")
import vllm.v1.worker.cpu_worker
gc.freeze()
runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
"""
# The engine inside one process, one thread, no compilation, a small cache, and no tokenizer, which the target lacks.
SMALL = (
    "--dtype float32 --max-model-len 128 --max-num-seqs 32 --max-num-batched-tokens 48 --host 127.0.0.1 "
    "--distributed-executor-backend uni --enforce-eager --block-size 32 --kv-cache-memory-bytes 67108864 --skip-tokenizer-init"
)
QUIET = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True)
class Server:
    """A running server and its target."""

    url: str
    key: str
    model: PreTrainedModel
    target_dir: Path

    def engine(self) -> ServerEngine:
        return server_engine(self.url, self.target_dir, CHUNKED)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path = tmp_path_factory.mktemp("server")
    model = save_target(path / "target", "llama")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = Server(f"http://127.0.0.1:{port}", secrets.token_hex(16), model, path / "target")
    arguments = shlex.split(f"--model {shlex.quote(str(server.target_dir))} --port {port} {SMALL}")
    environment = {**os.environ, **QUIET, "VLLM_API_KEY": server.key}
    with open(path / "log", "w+") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", FORKING, *arguments], env=environment, stdout=log, stderr=log
        )
        try:
            wait_until_healthy(process, server.url, path / "log")
            yield server
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)


def wait_until_healthy(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    end = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < end and process.poll() is None:
        try:
            if httpx.get(f"{url}/health", timeout=5).is_success:
                return
        except httpx.TransportError:
            time.sleep(0.2)
    pytest.fail(f"the server did not start:\n{log.read_text()[-4000:]}")


@pytest.fixture
def server(running: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    monkeypatch.setenv(KEY_VARIABLE, running.key)
    return running


def test_the_servers_greedy_answers_are_the_models_own(server: Server) -> None:
    engine = server.engine()
    prompts = [r.token_ids[:40] for r in random_rows()[:20]]
    greedy = Sampling(0.0, 1.0, 24)
    answers = answers_of(engine, prompts, greedy)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer == Answer(*greedy_answer(server.model, prompt, 24, END))
    assert {answer.finish_reason for answer in answers} == {"stop", "length"}
    endless = replace(greedy, ignore_eos=True)
    assert {len(answer.token_ids) for answer in answers_of(engine, prompts, endless)} == {24}
    warm = replace(greedy, temperature=1.0)
    assert answers_of(engine, prompts, warm) != answers_of(engine, prompts, warm)
    (at_the_limit,) = answers_of(engine, [[5] * 120], endless)
    assert len(at_the_limit.token_ids) == 8


def test_a_wrong_key_and_long_prompts_are_refused(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="refused /v1/completions: 400 .*at least 129 input tokens"):
        answers_of(server.engine(), [[1] * 129], Sampling(0.0, 1.0, 1))
    monkeypatch.setenv(KEY_VARIABLE, "wrong")
    with pytest.raises(ValueError, match=f"401 .*Unauthorized.*{KEY_VARIABLE}"):
        server.engine()
