"""The engine that asks a server: requests, answers, refusals. The server is a stand-in."""

import threading
from pathlib import Path
from typing import Any

import pytest

from eagle3.engine.progress import Report
from eagle3.engine.server import client
from eagle3.regenerate.answers import Answer, Request, Sampling
from tests.helpers.server_engines import ENGINE, PROMPTS, answers_of, server_engine
from tests.helpers.vllm_server import END, StandIn, lost, own_words, status, with_changes

pytestmark = pytest.mark.usefixtures("quick")


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ({"data": []}, r"exactly one model, got \[\]"),
        ({"data": [{"id": "a", "max_model_len": 99}, {"id": "b"}]}, r"exactly one model, got \['a', 'b'\]"),
        ({"data": [{"id": "a", "max_model_len": 63}]}, "must take 64 tokens, it takes 63"),
        ({"data": [{"id": "a"}]}, "must take 64 tokens, it takes None"),
        ({"models": ["a"]}, r"/v1/models without a required field \(data"),
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


def test_a_server_that_does_not_run_is_named(target: Path) -> None:
    absent = StandIn()
    absent.server_close()
    with pytest.raises(RuntimeError, match=f"{absent.url} gave no answer to /v1/models in 4 attempts"):
        server_engine(absent.url, target)


def test_answers_belong_to_their_prompts_whatever_fails_between(
    server: StandIn, target: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server.faults = [status(503), lost, status(429), status(500)]
    answers = answers_of(server_engine(server.url, target))
    assert answers == [Answer(own_words(p, 5), "length") for p in PROMPTS]
    assert "differ from run to run" not in caplog.text


def test_every_setting_that_shapes_an_answer_is_sent_and_no_seed_is(
    server: StandIn, target: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = server_engine(server.url, target)
    answers_of(engine, [[7, 8]], Sampling(0.7, 0.9, 5))
    (request,) = server.requests
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
    wanted |= {"presence_penalty": 0.0, "frequency_penalty": 0.0}
    assert request == wanted
    assert "differ from run to run" in caplog.text
    answers_of(engine, [[7, 8]], Sampling(0.0, 1.0, 5, ignore_eos=True))
    assert (server.requests[1]["ignore_eos"], server.requests[1]["stop_token_ids"]) == (True, [])


def test_an_answer_ends_where_an_engine_of_ours_would_end_it(server: StandIn, target: Path) -> None:
    (answer,) = answers_of(server_engine(server.url, target), [[3] * 62])
    assert len(answer.token_ids) == 2


def test_conversations_continue_next_to_each_other_until_nothing_follows(
    server: StandIn, target: Path
) -> None:
    server.together = threading.Barrier(3)
    found: dict[int, list[list[int]]] = {i: [] for i in range(3)}

    def follow(i: int, answer: Answer) -> Request | None:
        found[i].append(answer.token_ids)
        return Request([3, i, len(found[i])], Sampling(0.0, 1.0, 4)) if len(found[i]) < 3 else None

    server_engine(server.url, target).answer(
        {i: Request([3, i], Sampling(0.0, 1.0, 5)) for i in range(3)}, follow, 0, Report()
    )
    assert found == {
        i: [own_words([3, i], 5), own_words([3, i, 1], 4), own_words([3, i, 2], 4)] for i in range(3)
    }
    assert len(server.requests) == 9


def test_every_answer_counts_and_conversations_where_they_end(server: StandIn, target: Path) -> None:
    report = Report()
    requests = {i: Request([3, i], Sampling(0.0, 1.0, 5)) for i in range(3)}
    server_engine(server.url, target).answer(
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
        answers_of(server_engine(server.url, target), [[3]])
    server.faults = [with_changes(token_ids=[9, END], finish_reason="stop")]
    assert answers_of(server_engine(server.url, target), [[3]]) == [Answer([9, END], "stop")]


def test_twice_the_engines_sequences_are_in_flight(server: StandIn, target: Path) -> None:
    server.seconds_an_answer, server.together = 0.02, threading.Barrier(2 * ENGINE.max_num_seqs)
    answers_of(server_engine(server.url, target))
    assert server.most_in_flight == 2 * ENGINE.max_num_seqs


def test_a_server_that_dies_halfway_ends_the_call(server: StandIn, target: Path) -> None:
    server.dies_after = 3
    with pytest.raises(
        RuntimeError,
        match=f"{server.url} gave no answer to /v1/completions in {client.MAX_ATTEMPTS} attempts",
    ):
        answers_of(server_engine(server.url, target))


def test_the_first_failure_ends_the_call_and_asks_nothing_more(server: StandIn, target: Path) -> None:
    server.seconds_an_answer = 0.05
    server.faults = [status(400, {"error": "no"})] * len(PROMPTS)
    with pytest.raises(ValueError, match="refused /v1/completions: 400"):
        answers_of(server_engine(server.url, target))
    assert len(server.requests) <= 2 * ENGINE.max_num_seqs
