"""What a run says of itself: settings without secrets, versions, the line on the target's answers, the lines
that serve."""

import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from flytekit.types.directory import FlyteDirectory

from eagle3.config.data import DataConfig, SourceConfig
from eagle3.config.engine import EngineConfig, EvaluateConfig, FanOutConfig, TargetConfig
from eagle3.config.run import RunSettings
from eagle3.reports.data import answer_statistics
from tests.helpers.flyte_runs import make_recipe, pod
from workflows.flyte.interfaces import Target
from workflows.flyte.run_dir import path_for_reader, run_dir
from workflows.flyte.serve_lines import fetch_line, serve_lines
from workflows.flyte.terminal import answers_text
from workflows.tasks import summarize_run
from workflows.tasks.summarize_run import hub_target


def test_settings_are_the_recipes_blocks_with_their_defaults() -> None:
    settings = summarize_run.settings(make_recipe(vocab={"size": 7}))
    assert settings["vocab"] == {"size": 7}
    assert settings["fanout"] == FanOutConfig().model_dump()
    assert settings.keys() == RunSettings.model_fields.keys() - {"resources"}


def test_settings_keep_no_secret_of_a_url() -> None:
    source = SourceConfig(path="https://host:81/a.jsonl?token=word#word", name="a?b@c")
    fanout = FanOutConfig(server_urls=["http://host:8000", "http://host/x?word"])
    settings = summarize_run.settings(
        make_recipe(data=DataConfig(sources=[source], excluded=[source]), fanout=fanout)
    )
    assert settings["data"]["sources"][0] | {"path": "", "name": ""} == source.model_dump() | {
        "path": "",
        "name": "",
    }
    assert settings["data"]["sources"][0]["path"] == "https://host:81/a.jsonl"
    assert settings["data"]["sources"][0]["name"] == "a?b@c"
    assert settings["fanout"]["server_urls"] == ["http://host:8000", "http://host/x"]
    assert "word" not in str(settings)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/", "../a", "a\\b", "a\0b", "n" * 201])
def test_a_run_name_that_is_no_directorys_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ValueError,
        match=f"run_name must be the name of a directory in runs/.*got {re.escape(repr(name[:200]))}",
    ):
        run_dir(name)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["smoke", "..a", "a b", "7", "n" * 200])
def test_a_runs_reports_lie_in_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_dir(name) == tmp_path / "runs" / name
    assert (tmp_path / "runs" / name).is_dir()


def test_versions_are_those_of_this_process() -> None:
    versions = summarize_run.versions()
    for name in ("torch", "transformers", "flytekit"):
        assert versions[name] == version(name)
    assert versions["eagle3-flyte"].count(".") == 2
    assert all(versions.values())


def test_the_line_on_answers_adds_up_and_warns_of_the_limit() -> None:
    accounts = {
        "requested": 1200,
        "answered": 1190,
        "failed": 7,
        "failed: no_room": 7,
        "skipped": 3,
        "at_length_limit": 240,
    }
    text = answers_text(answer_statistics(accounts))
    assert text == (
        "1,200 requested = 1,190 answered + 7 failed (7 no_room) + 3 skipped; 240 at the length limit; 0 tool calls"
    )
    low = answers_text(answer_statistics(accounts | {"at_length_limit": 241}))
    assert "241 at the length limit, TOO MANY: raise regenerate.max_new_tokens" in low
    assert answers_text({}) == "the rows' own"


def test_a_place_is_a_path_here_and_a_name_in_the_output_of_a_pod(tmp_path: Path) -> None:
    assert path_for_reader(tmp_path / "report.html") == str(tmp_path / "report.html")
    with pod(tmp_path):
        assert path_for_reader(tmp_path / "report.html") == "report.html"


ENGINE, EVALUATE = (
    EngineConfig(max_model_len=64, max_num_batched_tokens=16),
    EvaluateConfig(num_speculative_tokens=2),
)
COMMON = (
    "--dtype float32 --max-model-len 64 --no-enable-chunked-prefill --max-num-batched-tokens 64 "
    "--speculative-config"
)


def test_a_draft_in_a_store_is_fetched_and_a_target_of_the_hub_served_by_its_id(tmp_path: Path) -> None:
    with pod(tmp_path):
        lines = serve_lines("s3://b/target", "s3://b/it's/eagle3", ("org/model", "0123"), ENGINE, EVALUATE)
    assert list(lines) == ["Fetch", "HTTP server", "Python"]
    assert lines["Fetch"] == fetch_line("s3://b/it's/eagle3", "draft")
    draft = '{"method": "eagle3", "model": "draft", "num_speculative_tokens": 2}'
    assert lines["HTTP server"] == f"vllm serve org/model --host 127.0.0.1 --revision 0123 {COMMON} '{draft}'"
    assert lines["Python"].startswith(
        "llm = vllm.LLM(model='org/model', revision='0123', dtype='float32', max_model_len=64, "
    )
    assert "'model': 'draft'" in lines["Python"]
    assert "s3://" not in lines["HTTP server"] + lines["Python"]


def test_a_target_that_is_on_no_hub_is_fetched_beside_the_draft(tmp_path: Path) -> None:
    with pod(tmp_path):
        lines = serve_lines("s3://b/target", "s3://b/eagle3", ("", ""), ENGINE, EVALUATE)
    fetch = (fetch_line("s3://b/eagle3", "draft"), fetch_line("s3://b/target", "target"))
    assert lines["Fetch"] == " && ".join(fetch)
    assert lines["HTTP server"].startswith(f"vllm serve target --host 127.0.0.1 {COMMON}")


def test_what_lies_here_is_served_from_where_it_lies(tmp_path: Path) -> None:
    lines = serve_lines(f"{tmp_path}/target", f"{tmp_path}/eagle3", ("org/model", "0123"), ENGINE, EVALUATE)
    assert list(lines) == ["HTTP server", "Python"]
    assert f" {tmp_path}/target --host 127.0.0.1 {COMMON}" in lines["HTTP server"]
    assert f'"model": "{tmp_path}/eagle3"' in lines["HTTP server"]
    assert "org/model" not in "".join(lines.values())


def test_a_split_target_is_served_on_as_many_gpus(tmp_path: Path) -> None:
    lines = serve_lines("target", "draft", ("", ""), ENGINE, EVALUATE, 4)
    assert "--max-model-len 64 --tensor-parallel-size 4 --no-enable" in lines["HTTP server"]
    assert (
        "vllm.LLM(model='target', dtype='float32', max_model_len=64, tensor_parallel_size=4"
        in lines["Python"]
    )


@pytest.mark.parametrize("name", ["draft", "it's"])
def test_the_line_that_fetches_copies_a_directory_as_it_is_into_another(tmp_path: Path, name: str) -> None:
    source = tmp_path / name
    (source / "inner").mkdir(parents=True)
    (source / "a.json").write_text("1")
    (source / "inner/b").write_text("2")
    (tmp_path / "here").mkdir()
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    for _ in range(2):
        line = fetch_line(f"file://{source}", "copy")
        subprocess.run(["bash", "-euc", line], cwd=tmp_path / "here", env=environment, check=True, timeout=60)
    copied = {
        str(path.relative_to(tmp_path / "here")) for path in (tmp_path / "here").rglob("*") if path.is_file()
    }
    assert copied == {"copy/a.json", "copy/inner/b"}


@pytest.mark.parametrize(
    ("target", "hub"),
    [
        (TargetConfig(name="org/model", revision="main"), ("org/model", "0123")),
        (TargetConfig(name="org/model", chat_template="other.jinja"), ("", "")),
        (TargetConfig(name="s3://b/model", public_name="org/model"), ("", "")),
    ],
)
def test_only_the_very_target_of_a_hub_is_served_by_its_id(
    target: TargetConfig, hub: tuple[str, str]
) -> None:
    fetched = Target("org/model", "0123", "digest", FlyteDirectory("s3://b/t"), 4, 10, 8)
    assert hub_target(target, fetched) == hub
