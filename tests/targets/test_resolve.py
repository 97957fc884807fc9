"""Targets by name: identity by content, the files that an engine reads, errors with path and remedy."""

import re
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import fsspec
import pytest
import torch
from safetensors.torch import save_file

from eagle3.config.engine import TargetConfig
from eagle3.targets import resolve
from eagle3.targets.resolve import fetch_target, fetch_tokenizer, identify_target

REMEDIES = {
    "absent.gguf": "no such GGUF file",
    "./absent": "no such directory",
    "/absent/model": "no such directory",
    "~/absent-model": "no such directory",
}


def write_target(directory: Path, value: float = 1.0) -> Path:
    directory.mkdir(parents=True)
    save_file({"w": torch.full((3,), value)}, directory / "model.safetensors")
    for name in ("config.json", "tokenizer.json", "chat_template.jinja", "README.md", "pytorch_model.bin"):
        (directory / name).write_text("{}")
    (directory / "original").mkdir()
    save_file({"w": torch.zeros(1)}, directory / "original" / "consolidated.safetensors")
    return directory


def test_a_directory_is_known_by_its_content_and_never_by_its_path(tmp_path: Path) -> None:
    first = write_target(tmp_path / "a" / "tiny")
    same = write_target(tmp_path / "b" / "tiny")
    other = write_target(tmp_path / "c" / "tiny", value=2.0)
    name, revision, digest = identify_target(TargetConfig(name=str(first)))
    assert (name, revision) == ("tiny", digest)
    assert identify_target(TargetConfig(name=str(same))) == (name, revision, digest)
    assert identify_target(TargetConfig(name=str(other)))[2] != digest
    assert identify_target(TargetConfig(name=str(first), public_name="org/tiny"))[0] == "org/tiny"
    (first / "README.md").write_text("read by no engine")
    assert identify_target(TargetConfig(name=str(first)))[2] == digest
    (first / "chat_template.jinja").write_text("changed")
    assert identify_target(TargetConfig(name=str(first)))[2] != digest


def test_only_what_an_engine_reads_is_fetched_and_fetching_twice_is_harmless(tmp_path: Path) -> None:
    cfg = TargetConfig(name=str(write_target(tmp_path / "tiny")))
    for _ in range(2):
        fetch_target(cfg, tmp_path / "out")
    found = {f.name for f in (tmp_path / "out").iterdir()}
    assert found == {"model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja"}


def test_config_and_tokenizer_are_fetched_without_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch_tokenizer(TargetConfig(name=str(write_target(tmp_path / "tiny"))), tmp_path / "out")
    assert {f.name for f in (tmp_path / "out").iterdir()} == {
        "config.json",
        "tokenizer.json",
        "chat_template.jinja",
    }
    asked = []
    monkeypatch.setattr(resolve, "download_from_hub", lambda *args: asked.append(args))
    fetch_tokenizer(TargetConfig(name="org/model", revision="0123"), tmp_path / "hub")
    ((_, name, revision, _, patterns, _),) = asked
    assert (name, revision) == ("org/model", "0123")
    assert not any(fnmatch("model-00001-of-00002.safetensors", pattern) for pattern in patterns)
    assert {"config.json", "tokenizer*", "*.jinja", "*.safetensors.index.json"} <= set(patterns)


@pytest.mark.parametrize(("name", "message"), REMEDIES.items())
def test_a_path_that_does_not_exist_is_named(name: str, message: str) -> None:
    for use in (identify_target, lambda cfg: fetch_target(cfg, "/nowhere")):
        with pytest.raises(ValueError, match=f"{re.escape(name)}.*{message}"):
            use(TargetConfig(name=name))


@pytest.mark.parametrize(
    ("removed", "message"), [("config.json", "no config.json"), ("model.safetensors", "no .*safetensors")]
)
def test_a_directory_without_a_model_is_refused_with_the_remedy(
    tmp_path: Path, removed: str, message: str
) -> None:
    directory = write_target(tmp_path / "tiny")
    (directory / removed).unlink()
    with pytest.raises(ValueError, match=f"{directory}.*{message}.*save"):
        identify_target(TargetConfig(name=str(directory)))


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_text("")
    with pytest.raises(ValueError, match=r"model\.bin is a file"):
        identify_target(TargetConfig(name=str(tmp_path / "model.bin")))


def test_a_hub_that_does_not_answer_is_reported_with_id_and_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    cfg = TargetConfig(name="example-org/absent", revision="v1")
    for use in (identify_target, lambda cfg: fetch_target(cfg, tmp_path / "out")):
        with pytest.raises(ValueError, match=r"example-org/absent \(revision v1\).*HF_TOKEN"):
            use(cfg)


@pytest.mark.parametrize(
    ("status", "kind"), [(None, ConnectionError), (503, ConnectionError), (404, ValueError)]
)
def test_only_passing_hub_faults_may_be_tried_again(
    monkeypatch: pytest.MonkeyPatch, status: int | None, kind: type[Exception]
) -> None:
    import httpx
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    def fail(*args: object, **kwargs: object) -> None:
        request = httpx.Request("GET", "http://hub.invalid")
        if status is None:
            raise httpx.ConnectError("no route", request=request)
        raise HfHubHTTPError("refused", response=httpx.Response(status, request=request))

    monkeypatch.setattr(HfApi, "model_info", fail)
    with pytest.raises(kind, match=r"example-org/absent .*HF_TOKEN"):
        identify_target(TargetConfig(name="example-org/absent"))


def test_a_hub_that_cannot_be_reached_may_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # the discard port: no one listens
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(
        ConnectionError, match=r"target example-org/absent .*check the id, the network and HF_TOKEN"
    ):
        identify_target(TargetConfig(name="example-org/absent"))


def test_without_weights_a_target_has_the_same_files_the_given_template_included(tmp_path: Path) -> None:
    (tmp_path / "other.jinja").write_text("{{ messages[0].content }}<|other|>")
    cfg = TargetConfig(name=str(write_target(tmp_path / "tiny")), chat_template=str(tmp_path / "other.jinja"))
    fetch_target(cfg, tmp_path / "whole")
    fetch_tokenizer(cfg, tmp_path / "light")
    files = {f.name: f.read_bytes() for f in (tmp_path / "whole").iterdir() if not f.match("*.safetensors")}
    assert {f.name: f.read_bytes() for f in (tmp_path / "light").iterdir()} == files
    assert "<|other|>" in files["chat_template.jinja"].decode()


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A target as a directory's URL."""
    directory = write_target(tmp_path / "models" / "tiny")
    if request.param == "file":
        yield f"file://{directory}"
        return
    store = fsspec.filesystem("memory")
    store.put(str(directory), "/models/tiny", recursive=True)
    yield "memory://models/tiny"
    store.store.clear()


def test_a_target_at_a_url_is_known_by_content_and_fetched_as_a_directory_is(
    url: str, tmp_path: Path
) -> None:
    name, revision, digest = identify_target(TargetConfig(name=f"{url}/"))
    assert (name, revision) == ("tiny", digest)
    assert identify_target(TargetConfig(name=url, public_name="org/tiny")) == ("org/tiny", digest, digest)
    for fetch, here, there in ((fetch_target, "a", "b"), (fetch_tokenizer, "c", "d")):
        fetch(TargetConfig(name=url), tmp_path / there)
        fetch(TargetConfig(name=str(tmp_path / "models" / "tiny")), tmp_path / here)
        files = {f.name: f.read_bytes() for f in (tmp_path / there).iterdir()}
        assert files == {f.name: f.read_bytes() for f in (tmp_path / here).iterdir()}
        assert files
    with fsspec.open(f"{url}/config.json", "wb") as file:
        file.write(b'{"changed": 1}')
    assert identify_target(TargetConfig(name=url))[2] != digest
    with fsspec.open(f"{url}/notes.bin", "wb") as file:
        file.write(b"not read")
    changed = identify_target(TargetConfig(name=url))[2]
    with fsspec.open(f"{url}/notes.bin", "wb") as file:
        file.write(b"not read either")
    assert identify_target(TargetConfig(name=url))[2] == changed


def test_a_url_without_a_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for url, message in (
        (f"file://{tmp_path}/empty", "has no config.json or no"),
        (f"file://{tmp_path}/absent", "cannot be listed"),
        ("nosuch://x/y", "cannot be listed"),
    ):
        with pytest.raises(ValueError, match=message):
            identify_target(TargetConfig(name=url))
