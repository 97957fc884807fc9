"""Faults of the protocol: what is asked again, what is refused and in which words, what stays secret."""

import asyncio
import logging
import re
from typing import Any

import pytest

from eagle3.engine.server import client
from eagle3.engine.server.client import ServerClient, server_root
from eagle3.regenerate.answers import Answer
from tests.helpers.vllm_server import StandIn, cut, hang, lost, own_words, page, status, with_changes

KEY = "sk-0123456789"


def ask(server: StandIn, count: int = 1, **changes: Any) -> list[Answer]:
    """Answers to `count` prompts, one after the other."""

    async def run() -> list[Answer]:
        async with ServerClient(server.url, **changes) as c:
            return [await c.complete("tiny", [5, i], 3, temperature=0.0) for i in range(count)]

    return asyncio.run(run())


@pytest.fixture(autouse=True)
def _no_key(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(client.KEY_VARIABLE, raising=False)


@pytest.mark.parametrize(
    "fault",
    [
        status(500, {"error": {"message": "out of luck"}}),
        status(503),
        status(429),
        status(408),
        lost,
        cut,
        page,
    ],
    ids=["500", "503", "429", "408", "lost", "cut", "page"],
)
def test_what_may_pass_is_asked_again(server: StandIn, fault: Any) -> None:
    server.faults = [fault, fault]
    assert [a.token_ids for a in ask(server, 2)] == [own_words([5, 0], 3), own_words([5, 1], 3)]
    assert len(server.requests) == 4
    assert server.requests[0] == server.requests[2]


def test_an_answer_that_does_not_come_is_asked_for_again(
    server: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "READ_TIMEOUT_S", 0.2)
    monkeypatch.setattr(client, "READ_TIMEOUT_PER_TOKEN_S", 0.1)
    server.faults = [hang(2)]
    assert ask(server)[0].token_ids == own_words([5, 0], 3)
    assert len(server.requests) > 1


def test_pauses_grow_and_obey_the_server(server: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(client, "FIRST_PAUSE_S", 0.5)
    monkeypatch.setattr(client, "LONGEST_PAUSE_S", 30.0)
    monkeypatch.setattr(client.asyncio, "sleep", sleep)
    server.faults = [status(503)] * 8 + [status(429, headers={"Retry-After": "25"})]
    ask(server)
    for pause, most in zip(pauses[:8], [0.5, 1, 2, 4, 8, 16, 30, 30], strict=True):
        assert most / 2 <= pause <= most
    assert len({pause / most for pause, most in zip(pauses[:6], [0.5, 1, 2, 4, 8, 16], strict=True)}) > 1
    assert pauses[8] >= 25


def test_a_lasting_fault_ends_with_its_last_words(server: StandIn, caplog: pytest.LogCaptureFixture) -> None:
    server.faults = [status(500, {"error": {"message": "EngineCore died"}})] * 9
    with pytest.raises(
        RuntimeError, match=f"{server.url} gave no answer to /v1/completions in 4 attempts.*EngineCore died"
    ):
        ask(server, max_attempts=4)
    assert len(server.requests) == 4
    assert len(caplog.records) == 1


def test_a_refusal_is_not_asked_again_and_carries_the_servers_words(server: StandIn) -> None:
    server.faults = [status(400, {"error": {"message": "max_tokens=9 is too much"}})]
    with pytest.raises(ValueError, match=r"refused /v1/completions: 400.*max_tokens=9 is too much"):
        ask(server)
    server.faults = [status(404), status(307, headers={"Location": "http://elsewhere.example"})]
    for code in ("404", "307"):
        with pytest.raises(ValueError, match=f"{code}.*the URL is the server's own"):
            ask(server)
    assert len(server.requests) == 3


def test_the_key_is_sent_and_never_shown(
    server: StandIn, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv(client.KEY_VARIABLE, KEY)
    ask(server)
    assert server.keys == {f"Bearer {KEY}"}
    for code in (401, 500):
        server.faults = [status(code, {"error": f"no such key: {KEY}"})] * 2
        with pytest.raises((ValueError, RuntimeError), match="no such key: …") as refused:
            ask(server, max_attempts=2)
        assert KEY not in str(refused.value)
        assert (client.KEY_VARIABLE in str(refused.value)) == (code == 401)
    assert KEY not in caplog.text
    monkeypatch.setenv(client.KEY_VARIABLE, f"{KEY}\nsecond line")
    with pytest.raises(ValueError, match="printable ASCII") as refused:
        ask(server)
    assert KEY not in str(refused.value)


def test_without_a_key_no_key_is_sent(server: StandIn) -> None:
    ask(server)
    assert server.keys == {None}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_token_ids": [1, 5, 0]}, "another prompt.*2 tokens were sent, 3 came back"),
        ({"prompt_token_ids": [5, 9]}, "another prompt.*token 1 was sent as 0 and came back as 9"),
        ({"token_ids": None}, r"choices\.0\.token_ids.*0\.10\.2"),
        ({"finish_reason": "abort"}, "ended an answer with 'abort'"),
    ],
)
def test_answers_that_are_not_what_was_asked_for_are_refused(
    server: StandIn, changes: dict[str, Any], message: str
) -> None:
    server.faults = [with_changes(**changes)]
    with pytest.raises(RuntimeError, match=message):
        ask(server)
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    "url", ["http://host:8000", "http://host:8000/", "http://host:8000/v1", "http://host:8000/v1/"]
)
def test_a_url_may_end_as_people_write_it(url: str) -> None:
    assert server_root(url) == "http://host:8000"
    assert server_root("https://host/vllm/v1") == "https://host/vllm"


@pytest.mark.parametrize("url", ["host:8000", "ftp://host", "", "http://", "http://host:port"])
def test_what_is_no_http_url_is_named(url: str) -> None:
    with pytest.raises(
        ValueError, match=f"must read http://host:port without a query, got {re.escape(repr(url))}"
    ):
        server_root(url)


def test_a_query_of_a_server_is_refused_without_showing_it() -> None:
    with pytest.raises(ValueError, match="without a query, got 'http://host:8000/v1'"):
        server_root("http://host:8000/v1?api_key=secret")


def test_a_url_with_a_password_is_refused_without_showing_it() -> None:
    with pytest.raises(ValueError, match=client.KEY_VARIABLE) as refused:
        server_root("http://user:secret@host:8000")
    assert "secret" not in str(refused.value)


def test_a_port_that_nobody_listens_on_is_named() -> None:
    server = StandIn()
    server.server_close()
    with pytest.raises(RuntimeError, match=f"{server.url}.*ConnectError.*see that it runs"):
        ask(server, max_attempts=2)
