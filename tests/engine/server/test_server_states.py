"""A server that captures: what is made of the files that it writes, what is refused. The server is a stand-in."""

import asyncio
import json
import os
import shlex
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from eagle3.engine.server import engine as server_engine
from eagle3.engine.server import state_files
from eagle3.engine.server.state_files import serve_line, written
from eagle3.regenerate.answers import Sampling
from eagle3.shards.tokens import TokenRow
from tests.helpers.server_engines import ENGINE, LAYER_IDS, PROMPTS, answer, engine
from tests.helpers.vllm_server import DEPTH, StandIn, lost, own_states, own_words

pytestmark = pytest.mark.usefixtures("quick")
ROWS = [
    TokenRow(f"row-{i}", "test", [3 + (i + j) % 40 for j in range(1 + i % 5)], [True] * (1 + i % 5))
    for i in range(12)
]
States = dict[int, tuple[Tensor, int]]


def capture(
    server: StandIn, target: Path, layer_ids: list[int] = LAYER_IDS, rows: list[TokenRow] = ROWS
) -> States:
    """What a server that writes to a directory hands over."""
    server.states_dir = target / "states"
    found: States = {}
    cached = engine(server, target, layer_ids).capture(
        rows, layer_ids, lambda i, s, token: found.update({i: (s.clone(), token)})
    )
    assert cached == len(rows)
    return found


@pytest.mark.parametrize(
    ("layer_ids", "files"), [([1, 3], [1, 3, 4]), ([1, 4], [1, 4]), ([0, 1, 2], [0, 1, 2, 4])]
)
def test_states_are_handed_on_with_the_last_layer_behind(
    server: StandIn, target: Path, layer_ids: list[int], files: list[int]
) -> None:
    server.layer_ids = files
    found = capture(server, target, layer_ids)
    assert sorted(found) == list(range(len(ROWS)))
    for i, row in enumerate(ROWS):
        assert torch.equal(found[i][0], own_states(row.token_ids, [*layer_ids, DEPTH]))
        assert found[i][1] == own_words(row.token_ids, 1)[0]
    assert list((target / "states").iterdir()) == []
    assert server.most_files <= 2 * ENGINE.max_num_seqs
    asked = server.requests[0]
    assert (asked["max_tokens"], asked["temperature"], asked["ignore_eos"]) == (1, 0.0, True)


def test_files_that_nobody_read_are_deleted_and_other_peoples_are_not(server: StandIn, target: Path) -> None:
    def answer_gets_lost(handler: Any, request: dict[str, Any]) -> None:
        server.write_states(request)
        lost(handler, request)

    (target / "states").mkdir()
    for name, age_s in {"eagle3-killed-1": 7200, "eagle3-alive-1": 60, "of-somebody": 7200}.items():
        path = target / "states" / f"cmpl-{name}.safetensors"
        path.touch()
        os.utime(path, (time.time() - age_s,) * 2)
    server.faults = [answer_gets_lost, answer_gets_lost]
    assert len(capture(server, target)) == len(ROWS)
    kept = ["cmpl-eagle3-alive-1.safetensors", "cmpl-of-somebody.safetensors"]
    assert sorted(p.name for p in (target / "states").iterdir()) == kept


def test_rows_wait_for_room_and_reach_one_thread_at_a_time(
    server: StandIn, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_engine, "IN_FLIGHT_BYTES", 1)
    server.seconds_an_answer = 0.01
    capture(server, target)
    assert server.most_in_flight == 1

    busy = threading.Lock()

    def add(index: int, states: Tensor, token: int) -> None:
        assert busy.acquire(blocking=False)
        threading.Event().wait(0.005)
        busy.release()

    monkeypatch.undo()
    server.together = threading.Barrier(2 * ENGINE.max_num_seqs)
    engine(server, target, LAYER_IDS).capture(ROWS, LAYER_IDS, add)
    assert server.most_in_flight == 2 * ENGINE.max_num_seqs


def change(**tensors: Any) -> Callable[[Path, dict[str, Tensor]], None]:
    """Write other tensors than were captured; a function gets the true one, None leaves it out."""

    def write(path: Path, true: dict[str, Tensor]) -> None:
        changed = {k: tensors[k](v) if tensors.get(k) else v for k, v in true.items() if tensors.get(k, 1)}
        save_file(changed, path)

    return write


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path, tensors: None, "failed to write this row's states.*full memory file system"),
        (lambda path, tensors: path.write_bytes(b"\x08\0\0"), "failed to write this row's states"),
        (change(hidden_states=None), "failed to write this row's states.*hidden_states"),
        (change(token_ids=lambda t: t + 1), "row row-0: the server captured other token ids"),
        (
            change(layer_ids=lambda t: t - 1),
            r"must capture layers \[1, 3, 4\], it captures \[0, 2, 3\].*--speculative-config",
        ),
        (
            change(layer_ids=None, hidden_states=lambda t: t[:, 1:].contiguous()),
            r"must capture layers \[1, 3, 4\], it captures 2",
        ),
        (
            change(hidden_states=lambda t: t[..., 1:].contiguous()),
            r"must be \(1, 3, 4\) float32, the server wrote \(1, 3, 3\)",
        ),
        (change(hidden_states=lambda t: t.half()), r"must be \(1, 3, 4\) float32.*float16"),
    ],
)
def test_files_that_hold_something_else_are_refused(
    server: StandIn, target: Path, write: Any, message: str
) -> None:
    server.write = write
    with pytest.raises((ValueError, RuntimeError), match=f"(?s){message}"):
        capture(server, target, rows=ROWS[:1])
    assert list((target / "states").iterdir()) == []


def test_a_file_that_does_not_name_its_layers_passes_with_a_warning(
    server: StandIn, target: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server.write = change(layer_ids=None)
    capture(server, target)
    assert [r.message for r in caplog.records if "do not name their layers" in r.message] != []
    assert len(caplog.records) == 1


def elsewhere(handler: Any, request: dict[str, Any]) -> None:
    """A server on another machine: its file is nowhere here."""
    choice = {"token_ids": [3], "prompt_token_ids": request["prompt"], "finish_reason": "length"}
    path = f"/nowhere/cmpl-{request['request_id']}-0.safetensors"
    handler.reply({"choices": [choice], "kv_transfer_params": {"hidden_states_path": path}})


def test_a_server_without_files_or_with_files_elsewhere_is_told_how_to_start(
    server: StandIn, target: Path
) -> None:
    key_and_line = r"VLLM_API_KEY there and in EAGLE3_SERVER_KEY here.*vllm.entrypoints.openai.api_server .*HiddenStatesFileConnector"
    with pytest.raises(ValueError, match=rf"(?s)no hidden states.*{key_and_line}"):
        engine(server, target, LAYER_IDS).capture(ROWS, LAYER_IDS, lambda *row: None)
    server.faults = [elsewhere] * 5
    with pytest.raises(ValueError, match=r"(?s)\.lock is not there for this process.*shared_storage_path"):
        engine(server, target, LAYER_IDS).capture(ROWS, LAYER_IDS, lambda *row: None)


def test_a_file_that_is_not_the_requests_own_is_neither_read_nor_deleted(
    server: StandIn, target: Path, tmp_path: Path
) -> None:
    other = tmp_path / "precious"
    for path in (other, other.with_name("precious.lock")):
        path.write_text("x")

    def somebody_elses(handler: Any, request: dict[str, Any]) -> None:
        choice = {"token_ids": [3], "prompt_token_ids": request["prompt"], "finish_reason": "length"}
        handler.reply({"choices": [choice], "kv_transfer_params": {"hidden_states_path": str(other)}})

    for work in (
        lambda: engine(server, target, LAYER_IDS).capture(ROWS, LAYER_IDS, lambda *row: None),
        lambda: answer(server, target, PROMPTS),
    ):
        server.faults = [somebody_elses] * 5
        with pytest.raises(RuntimeError, match=f"names a file that is not this request's: {other}"):
            work()
    assert (other.read_text(), other.with_name("precious.lock").read_text()) == ("x", "x")


def test_a_writer_that_never_ends_is_given_up(server: StandIn, tmp_path: Path) -> None:
    server.states_dir = tmp_path
    server.write = lambda path, tensors: threading.Event().wait(1)
    path = server.write_states({"request_id": "r", "prompt": [1]})
    with pytest.raises(RuntimeError, match="has been writing for 0 s"):
        asyncio.run(written(path, timeout_s=0.1))


def test_a_failure_of_the_taker_ends_the_capture(server: StandIn, target: Path) -> None:
    server.states_dir = target / "states"

    def add(index: int, states: Tensor, token: int) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        engine(server, target, LAYER_IDS).capture(ROWS, LAYER_IDS, add)
    assert len(server.requests) < len(ROWS)


def test_a_server_that_captures_may_generate_and_its_files_are_deleted(server: StandIn, target: Path) -> None:
    server.states_dir = target / "states"
    server.metrics = lambda: f'vllm:spec_decode_num_drafts_total{{engine="0"}} {len(server.requests)}.0\n'
    made = answer(server, target, PROMPTS)
    assert [a["token_ids"] for a in made["answers"]] == [own_words(p, 5) for p in PROMPTS]
    assert (made["num_drafts"], list((target / "states").iterdir())) == (0, [])
    assert server.most_files <= 2 * ENGINE.max_num_seqs
    server.faults = [elsewhere]
    with pytest.raises(ValueError, match="without --kv-transfer-config"):
        answer(server, target, [[3]], Sampling(0.0, 1.0, 1))


def test_the_command_line_reads_back_as_it_was_meant(target: Path) -> None:
    spaced = target / "my target"
    spaced.mkdir()
    (spaced / "config.json").write_text((target / "config.json").read_text())
    words = shlex.split(
        serve_line(spaced, LAYER_IDS, ENGINE.model_copy(update={"enforce_eager": True}), "/dev/shm/x")
    )
    value = dict(pairwise(words))
    assert (value["--model"], value["--max-model-len"], value["--dtype"]) == (str(spaced), "65", "float32")
    assert value["--host"] == "127.0.0.1"
    assert "--enforce-eager" in words
    config = json.loads(value["--speculative-config"])["draft_model_config"]["hf_config"]
    assert config == {"eagle_aux_hidden_state_layer_ids": [1, 3, DEPTH]}
    transfer = json.loads(value["--kv-transfer-config"])
    assert transfer["kv_connector_extra_config"] == {
        "shared_storage_path": "/dev/shm/x",
        "use_synchronization_lock": True,
    }
    assert state_files.USUAL_DIR in serve_line(spaced, LAYER_IDS, ENGINE)
