"""What a run says of itself: settings without secrets, versions, the line on the target's answers."""

from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from pathlib import Path

from flyte_runs import pod

from eagle3.config import DataConfig, FanOutConfig, SourceConfig, VocabConfig
from eagle3.data.report import answer_figures
from workflows import summary


def test_settings_are_the_recipes_blocks_with_their_defaults() -> None:
    settings = summary.settings([VocabConfig(size=7), FanOutConfig()])
    assert settings == {"vocab": {"size": 7}, "fanout": FanOutConfig().model_dump()}


def test_settings_keep_no_secret_of_a_url() -> None:
    source = SourceConfig(path="https://me:word@host:81/a.jsonl?token=word#word", name="a?b@c")
    fanout = FanOutConfig(server_urls=["http://host:8000", "http://word@host/x"])
    settings = summary.settings([DataConfig(sources=[source], excluded=[source]), fanout])
    assert settings["data"]["sources"][0] | {"path": "", "name": ""} == source.model_dump() | {"path": "", "name": ""}
    assert settings["data"]["sources"][0]["path"] == "https://host:81/a.jsonl"
    assert settings["data"]["sources"][0]["name"] == "a?b@c"
    assert settings["fanout"]["server_urls"] == ["http://host:8000", "http://host/x"]
    assert "word" not in str(settings)


def test_versions_are_those_of_this_process() -> None:
    versions = summary.versions()
    for name in ("torch", "transformers", "flytekit"):
        assert versions[name] == version(name)
    assert versions["eagle3-flyte"].count(".") == 2
    assert all(versions.values())


def test_the_date_is_now_and_says_its_zone() -> None:
    age = datetime.now(UTC) - datetime.fromisoformat(summary.date())
    assert timedelta(0) <= age < timedelta(seconds=5)


def test_the_line_on_answers_adds_up_and_warns_of_the_limit() -> None:
    accounts = {"requested": 1200, "answered": 1190, "failed": 7, "failed: no_room": 7, "skipped": 3, "at_length_limit": 240}
    text = summary.answers_text(answer_figures(accounts))
    assert text == ("1,200 requested = 1,190 answered + 7 failed (7 no_room) + 3 skipped; 240 at the length limit; 0 tool calls")
    low = summary.answers_text(answer_figures(accounts | {"at_length_limit": 241}))
    assert "241 at the length limit, TOO MANY: raise regenerate.max_new_tokens" in low
    assert summary.answers_text({}) == "the rows' own"


def test_a_place_is_a_path_here_and_a_name_in_the_output_of_a_pod(tmp_path: Path) -> None:
    assert summary.place_of(tmp_path / "report.html") == str(tmp_path / "report.html")
    with pod(tmp_path):
        assert summary.place_of(tmp_path / "report.html") == "report.html"
