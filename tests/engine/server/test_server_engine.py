"""A server as an engine: what it is asked, what is made of its answers, what is refused. The server is a stand-in."""

import threading
from pathlib import Path
from typing import Any

import pytest

from eagle3.engine.progress import Report
from eagle3.engine.server import client
from eagle3.engine.server.engine import draft_counts
from eagle3.regenerate.answers import Answer, Request, Sampling
from tests.helpers.server_engines import ENGINE, PROMPTS, answer, server_engine
from tests.helpers.vllm_server import DEPTH, END, StandIn, lost, own_words, status, with_changes

pytestmark = pytest.mark.usefixtures("quick")


def test_it_says_what_the_server_said(server: StandIn, target: Path) -> None:
    told = server_engine(server.url, target).describe()
    assert (told["engine"], told["engine_version"]) == ("vllm server", "vllm 0.32.0")
    assert (told["server_max_model_len"], told["dtype"], told["last_layer_id"]) == (65, "float32", DEPTH)


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ({"data": []}, r"exactly one model, got \[\]"),
        ({"data": [{"id": "a", "max_model_len": 99}, {"id": "b"}]}, r"exactly one model, got \['a', 'b'\]"),
        ({"data": [{"id": "a", "max_model_len": 63}]}, "must take 64 tokens, it takes 63"),
        ({"data": [{"id": "a"}]}, "must take 64 tokens, it takes None"),
        ({"models": ["a"]}, r"/v1/models without what is needed \(data"),
        ("<html>hello</html>", "no JSON but '<html>hello</html>'"),
    ],
)
def test_a_server_that_does_not_fit_is_refused_before_any_work(
    server: StandIn, target: Path, models: Any, message: str
) -> None:
    server.models = models
    with pytest.raises((ValueError, RuntimeError), match=message):
        server_engine(server.url, target)
    assert server.requests == []


def test_a_server_that_is_not_there_or_cannot_draft_is_refused(server: StandIn, target: Path) -> None:
    with pytest.raises(ValueError, match="cannot load a draft"):
        server_engine(server.url, target, draft_dir="draft")
    absent = StandIn()
    absent.server_close()
    with pytest.raises(RuntimeError, match=f"{absent.url} gave no answer to /version in 4 attempts"):
        server_engine(absent.url, target)


def test_answers_come_in_the_order_of_their_prompts_whatever_fails_between(
    server: StandIn, target: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server.faults = [status(503), lost, status(429), status(500)]
    made = answer(server, target, PROMPTS)
    assert [a["token_ids"] for a in made["answers"]] == [own_words(p, 5) for p in PROMPTS]
    assert {a["finish_reason"] for a in made["answers"]} == {"length"}
    assert (made["generated_tokens"], made["num_drafts"], made["accepted_per_position"]) == (60, 0, [])
    assert made["seconds"] > 0
    assert "differ from run to run" not in caplog.text


def test_every_setting_that_shapes_an_answer_is_sent_and_no_seed_is(
    server: StandIn, target: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = answer(server, target, [[7, 8]], Sampling(0.7, 0.9, 5))
    (request,) = server.requests
    assert len(made["answers"]) == 1
    wanted = {
        "model": "tiny",
        "prompt": [7, 8],
        "max_tokens": 5,
        "temperature": 0.7,
        "top_p": 0.9,
        "stop_token_ids": [END],
    }
    wanted |= {
        "ignore_eos": False,
        "return_token_ids": True,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
    }
    wanted |= {"presence_penalty": 0.0, "frequency_penalty": 0.0, "request_id": request["request_id"]}
    assert request == wanted
    assert "differ from run to run" in caplog.text
    answer(server, target, [[7, 8]], Sampling(0.0, 1.0, 5, ignore_eos=True))
    assert (server.requests[1]["ignore_eos"], server.requests[1]["stop_token_ids"]) == (True, [])


def test_an_answer_ends_where_an_engine_of_ours_would_end_it(server: StandIn, target: Path) -> None:
    made = answer(server, target, [[3] * 62])
    assert len(made["answers"][0]["token_ids"]) == 2


def test_conversations_go_on_side_by_side_until_nothing_follows(server: StandIn, target: Path) -> None:
    server.together = threading.Barrier(3)
    found: dict[int, list[list[int]]] = {i: [] for i in range(3)}

    def follow(i: int, answer: Answer) -> Request | None:
        found[i].append(answer.token_ids)
        return Request([3, i, len(found[i])], Sampling(0.0, 1.0, 4)) if len(found[i]) < 3 else None

    server_engine(server.url, target).play(
        {i: Request([3, i], Sampling(0.0, 1.0, 5)) for i in range(3)}, follow, 0, Report()
    )
    assert found == {
        i: [own_words([3, i], 5), own_words([3, i, 1], 4), own_words([3, i, 2], 4)] for i in range(3)
    }
    assert len({request["request_id"] for request in server.requests}) == 9


def test_every_answer_counts_and_conversations_where_they_end(server: StandIn, target: Path) -> None:
    report = Report()
    requests = {i: Request([3, i], Sampling(0.0, 1.0, 5)) for i in range(3)}
    server_engine(server.url, target).play(
        requests,
        lambda i, a: Request([3], Sampling(0.0, 1.0, 4)) if len(a.token_ids) == 5 and i else None,
        0,
        report,
    )
    assert (report.tokens, report.conversations) == (3 * 5 + 2 * 4, 3)


def test_an_answer_that_the_server_cuts_short_is_refused(server: StandIn, target: Path) -> None:
    server.faults = [with_changes(token_ids=[9, 9])]
    with pytest.raises(
        RuntimeError, match="5 tokens were asked for.*stopped after 2.*--generation-config vllm"
    ):
        answer(server, target, [[3]])
    server.faults = [with_changes(token_ids=[9, END], finish_reason="stop")]
    assert answer(server, target, [[3]])["answers"][0]["token_ids"] == [9, END]


def test_twice_the_engines_sequences_are_in_flight(server: StandIn, target: Path) -> None:
    server.seconds_an_answer, server.together = 0.02, threading.Barrier(2 * ENGINE.max_num_seqs)
    answer(server, target, PROMPTS)
    assert server.most_in_flight == 2 * ENGINE.max_num_seqs


def test_a_server_that_dies_in_the_middle_ends_the_call(server: StandIn, target: Path) -> None:
    server.dies_after = 3
    with pytest.raises(
        RuntimeError,
        match=f"{server.url} gave no answer to /v1/completions in {client.MAX_ATTEMPTS} attempts",
    ):
        answer(server, target, PROMPTS)


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
    made = answer(server, target, [[3]])
    assert (made["num_drafts"], made["num_accepted_tokens"], made["accepted_per_position"]) == (9, 7, [5, 2])


def test_the_first_failure_ends_the_call_and_asks_nothing_more(server: StandIn, target: Path) -> None:
    server.seconds_an_answer = 0.05
    server.faults = [status(400, {"error": "no"})] * len(PROMPTS)
    with pytest.raises(ValueError, match="refused /v1/completions: 400"):
        answer(server, target, PROMPTS)
    assert len(server.requests) <= 2 * ENGINE.max_num_seqs
