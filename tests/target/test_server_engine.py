"""A server as an engine: what it is asked, what is made of its answers and files, what is refused. The server is a stand-in."""

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

from eagle3.config import EngineConfig
from eagle3.shards import TokenRow
from eagle3.target import client, server_engine, state_files
from eagle3.target.answers import Answer, Request, Sampling
from eagle3.target.progress import Report
from eagle3.target.server_engine import ServerEngine, draft_counts
from eagle3.target.state_files import serve_line, written
from tests.target.stand_in import DEPTH, END, WIDTH, StandIn, lost, own_states, own_words, status, with_changes

ENGINE = EngineConfig(dtype="float32", max_model_len=64, max_num_seqs=2)
LAYER_IDS = [1, 3]
GREEDY: dict[str, Any] = {
    "temperature": 0.0,
    "top_p": 1.0,
    "max_new_tokens": 5,
    "seed": 0,
    "ignore_eos": False,
    "report": Report(),
}
PROMPTS = [[3, i, i + 1][: 1 + i % 3] for i in range(12)]
ROWS = [TokenRow(f"row-{i}", "test", [3 + (i + j) % 40 for j in range(1 + i % 5)], [True] * (1 + i % 5)) for i in range(12)]
States = dict[int, tuple[Tensor, int]]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(client, "LONGEST_PAUSE_S", 0.01)
    monkeypatch.setattr(server_engine, "ABORT_S", 0.0)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    config = {"num_hidden_layers": DEPTH, "hidden_size": WIDTH, "eos_token_id": END}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def engine(server: StandIn, target: Path, layer_ids: list[int] | None = None, **changes: Any) -> ServerEngine:
    settings = {"target_dir": str(target), "layer_ids": layer_ids, "draft_dir": None, "num_speculative_tokens": 0}
    return ServerEngine({**settings, "engine": ENGINE.model_dump(), "server_url": server.url, **changes})


def capture(server: StandIn, target: Path, layer_ids: list[int] = LAYER_IDS, rows: list[TokenRow] = ROWS) -> States:
    """What a server that writes to a directory hands over."""
    server.states_dir = target / "states"
    found: States = {}
    cached = engine(server, target, layer_ids).capture(rows, layer_ids, lambda i, s, token: found.update({i: (s.clone(), token)}))
    assert cached == len(rows)
    return found


def test_it_says_what_the_server_said(server: StandIn, target: Path) -> None:
    told = engine(server, target).describe()
    assert (told["engine"], told["engine_version"]) == ("vllm server", "vllm 0.32.0")
    assert (told["server_max_model_len"], told["dtype"], told["last_layer_id"]) == (65, "float32", DEPTH)


@pytest.mark.parametrize(
    ("models", "layer_ids", "message"),
    [
        ({"data": []}, None, r"exactly one model, got \[\]"),
        ({"data": [{"id": "a", "max_model_len": 99}, {"id": "b"}]}, None, r"exactly one model, got \['a', 'b'\]"),
        ({"data": [{"id": "a", "max_model_len": 63}]}, None, "must take 64 tokens, it takes 63"),
        ({"data": [{"id": "a", "max_model_len": 64}]}, LAYER_IDS, "must take 65 tokens, it takes 64"),
        ({"data": [{"id": "a"}]}, None, "must take 64 tokens, it takes None"),
        ({"models": ["a"]}, None, r"/v1/models without what is needed \(data"),
        ("<html>hello</html>", None, "no JSON but '<html>hello</html>'"),
    ],
)
def test_a_server_that_does_not_fit_is_refused_before_any_work(
    server: StandIn, target: Path, models: Any, layer_ids: list[int] | None, message: str
) -> None:
    server.models = models
    with pytest.raises((ValueError, RuntimeError), match=message):
        engine(server, target, layer_ids)
    assert server.requests == []


def test_a_server_that_is_not_there_or_cannot_draft_is_refused(server: StandIn, target: Path) -> None:
    with pytest.raises(ValueError, match="cannot load a draft"):
        engine(server, target, draft_dir="draft")
    absent = StandIn()
    absent.server_close()
    with pytest.raises(RuntimeError, match=f"{absent.url} gave no answer to /version in 4 attempts"):
        engine(absent, target)


def test_answers_come_in_the_order_of_their_prompts_whatever_fails_between(
    server: StandIn, target: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server.faults = [status(503), lost, status(429), status(500)]
    made = engine(server, target).generate(PROMPTS, **GREEDY)
    assert [a["token_ids"] for a in made["answers"]] == [own_words(p, 5) for p in PROMPTS]
    assert {a["finish_reason"] for a in made["answers"]} == {"length"}
    assert (made["generated_tokens"], made["num_drafts"], made["accepted_per_position"]) == (60, 0, [])
    assert made["seconds"] > 0
    assert "differ from run to run" not in caplog.text


def test_every_setting_that_shapes_an_answer_is_sent_and_no_seed_is(
    server: StandIn, target: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = engine(server, target).generate([[7, 8]], **{**GREEDY, "temperature": 0.7, "top_p": 0.9})
    (request,) = server.requests
    assert len(made["answers"]) == 1
    wanted = {"model": "tiny", "prompt": [7, 8], "max_tokens": 5, "temperature": 0.7, "top_p": 0.9, "stop_token_ids": [END]}
    wanted |= {"ignore_eos": False, "return_token_ids": True, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    wanted |= {"presence_penalty": 0.0, "frequency_penalty": 0.0, "request_id": request["request_id"]}
    assert request == wanted
    assert "differ from run to run" in caplog.text
    engine(server, target).generate([[7, 8]], **{**GREEDY, "ignore_eos": True})
    assert (server.requests[1]["ignore_eos"], server.requests[1]["stop_token_ids"]) == (True, [])


def test_an_answer_ends_where_an_engine_of_ours_would_end_it(server: StandIn, target: Path) -> None:
    made = engine(server, target).generate([[3] * 62], **GREEDY)
    assert len(made["answers"][0]["token_ids"]) == 2


def test_conversations_go_on_side_by_side_until_nothing_follows(server: StandIn, target: Path) -> None:
    server.together = threading.Barrier(3)
    found: dict[int, list[list[int]]] = {i: [] for i in range(3)}

    def follow(i: int, answer: Answer) -> Request | None:
        found[i].append(answer.token_ids)
        return Request([3, i, len(found[i])], Sampling(0.0, 1.0, 4)) if len(found[i]) < 3 else None

    engine(server, target).play({i: Request([3, i], Sampling(0.0, 1.0, 5)) for i in range(3)}, follow, 0, Report())
    assert found == {i: [own_words([3, i], 5), own_words([3, i, 1], 4), own_words([3, i, 2], 4)] for i in range(3)}
    assert len({request["request_id"] for request in server.requests}) == 9


def test_every_answer_counts_and_conversations_where_they_end(server: StandIn, target: Path) -> None:
    report = Report()
    requests = {i: Request([3, i], Sampling(0.0, 1.0, 5)) for i in range(3)}
    engine(server, target).play(
        requests, lambda i, a: Request([3], Sampling(0.0, 1.0, 4)) if len(a.token_ids) == 5 and i else None, 0, report
    )
    assert (report.tokens, report.conversations) == (3 * 5 + 2 * 4, 3)


def test_an_answer_that_the_server_cuts_short_is_refused(server: StandIn, target: Path) -> None:
    server.faults = [with_changes(token_ids=[9, 9])]
    with pytest.raises(RuntimeError, match="5 tokens were asked for.*stopped after 2.*--generation-config vllm"):
        engine(server, target).generate([[3]], **GREEDY)
    server.faults = [with_changes(token_ids=[9, END], finish_reason="stop")]
    assert engine(server, target).generate([[3]], **GREEDY)["answers"][0]["token_ids"] == [9, END]


def test_twice_the_engines_sequences_are_in_flight(server: StandIn, target: Path) -> None:
    server.seconds_an_answer, server.together = 0.02, threading.Barrier(2 * ENGINE.max_num_seqs)
    engine(server, target).generate(PROMPTS, **GREEDY)
    assert server.most_in_flight == 2 * ENGINE.max_num_seqs


def test_a_server_that_dies_in_the_middle_ends_the_call(server: StandIn, target: Path) -> None:
    server.dies_after = 3
    with pytest.raises(RuntimeError, match=f"{server.url} gave no answer to /v1/completions in {client.MAX_ATTEMPTS} attempts"):
        engine(server, target).generate(PROMPTS, **GREEDY)


def test_drafts_are_counted_from_the_metrics(server: StandIn, target: Path) -> None:
    def metrics(drafts: int, first: int, second: int) -> str:
        return (
            "# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.\n"
            f'vllm:spec_decode_num_drafts_total{{engine="0",model_name="t{{}}"}} {drafts}.0\n'
            f'vllm:spec_decode_num_draft_tokens_total{{engine="0",model_name="t"}} {2 * drafts}.0\n'
            f'vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="t"}} {first + second}.0\n'
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="0"}} {first}.0\n'
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="1"}} {second}.0\n'
        )

    assert draft_counts(metrics(9, 5, 2) * 2) == {"drafts": 18, "accepted_tokens": 14, 0: 10, 1: 4}
    server.metrics = iter([metrics(100, 50, 20), metrics(109, 55, 22)]).__next__
    made = engine(server, target).generate([[3]], **GREEDY)
    assert (made["num_drafts"], made["num_accepted_tokens"], made["accepted_per_position"]) == (9, 7, [5, 2])


@pytest.mark.parametrize(("layer_ids", "files"), [([1, 3], [1, 3, 4]), ([1, 4], [1, 4]), ([0, 1, 2], [0, 1, 2, 4])])
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
        (change(layer_ids=lambda t: t - 1), r"must capture layers \[1, 3, 4\], it captures \[0, 2, 3\].*--speculative-config"),
        (
            change(layer_ids=None, hidden_states=lambda t: t[:, 1:].contiguous()),
            r"must capture layers \[1, 3, 4\], it captures 2",
        ),
        (change(hidden_states=lambda t: t[..., 1:].contiguous()), r"must be \(1, 3, 4\) float32, the server wrote \(1, 3, 3\)"),
        (change(hidden_states=lambda t: t.half()), r"must be \(1, 3, 4\) float32.*float16"),
    ],
)
def test_files_that_hold_something_else_are_refused(server: StandIn, target: Path, write: Any, message: str) -> None:
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


def test_a_server_without_files_or_with_files_elsewhere_is_told_how_to_start(server: StandIn, target: Path) -> None:
    with pytest.raises(ValueError, match=r"(?s)no hidden states.*vllm.entrypoints.openai.api_server .*HiddenStatesFileConnector"):
        engine(server, target, LAYER_IDS).capture(ROWS, LAYER_IDS, lambda *row: None)
    server.faults = [elsewhere] * 5
    with pytest.raises(ValueError, match=r"(?s)\.lock is not there for this process.*shared_storage_path"):
        engine(server, target, LAYER_IDS).capture(ROWS, LAYER_IDS, lambda *row: None)


def test_a_file_that_is_not_the_requests_own_is_neither_read_nor_deleted(server: StandIn, target: Path, tmp_path: Path) -> None:
    other = tmp_path / "precious"
    for path in (other, other.with_name("precious.lock")):
        path.write_text("x")

    def somebody_elses(handler: Any, request: dict[str, Any]) -> None:
        choice = {"token_ids": [3], "prompt_token_ids": request["prompt"], "finish_reason": "length"}
        handler.reply({"choices": [choice], "kv_transfer_params": {"hidden_states_path": str(other)}})

    for work in (
        lambda: engine(server, target, LAYER_IDS).capture(ROWS, LAYER_IDS, lambda *row: None),
        lambda: engine(server, target).generate(PROMPTS, **GREEDY),
    ):
        server.faults = [somebody_elses] * 5
        with pytest.raises(RuntimeError, match=f"names a file that is not this request's: {other}"):
            work()
    assert (other.read_text(), other.with_name("precious.lock").read_text()) == ("x", "x")


def elsewhere(handler: Any, request: dict[str, Any]) -> None:
    """A server on another machine: its file is nowhere here."""
    choice = {"token_ids": [3], "prompt_token_ids": request["prompt"], "finish_reason": "length"}
    path = f"/nowhere/cmpl-{request['request_id']}-0.safetensors"
    handler.reply({"choices": [choice], "kv_transfer_params": {"hidden_states_path": path}})


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
    made = engine(server, target).generate(PROMPTS, **GREEDY)
    assert [a["token_ids"] for a in made["answers"]] == [own_words(p, 5) for p in PROMPTS]
    assert (made["num_drafts"], list((target / "states").iterdir())) == (0, [])
    assert server.most_files <= 2 * ENGINE.max_num_seqs
    server.faults = [elsewhere]
    with pytest.raises(ValueError, match="without --kv-transfer-config"):
        engine(server, target).generate([[3]], **{**GREEDY, "max_new_tokens": 1})


def test_the_command_line_reads_back_as_it_was_meant(target: Path) -> None:
    spaced = target / "my target"
    spaced.mkdir()
    (spaced / "config.json").write_text((target / "config.json").read_text())
    words = shlex.split(serve_line(spaced, LAYER_IDS, ENGINE.model_copy(update={"enforce_eager": True}), "/dev/shm/x"))
    value = dict(pairwise(words))
    assert (value["--model"], value["--max-model-len"], value["--dtype"]) == (str(spaced), "65", "float32")
    assert "--enforce-eager" in words
    config = json.loads(value["--speculative-config"])["draft_model_config"]["hf_config"]
    assert config == {"eagle_aux_hidden_state_layer_ids": [1, 3, DEPTH]}
    transfer = json.loads(value["--kv-transfer-config"])
    assert transfer["kv_connector_extra_config"] == {"shared_storage_path": "/dev/shm/x", "use_synchronization_lock": True}
    assert state_files.USUAL_DIR in serve_line(spaced, LAYER_IDS, ENGINE)
