"""Sources: places and versions, directories, and hub data sets.

No test reaches the hub: its answer about a commit is made up, and `datasets` streams a directory of the same
layout.
"""

import gzip
import json
import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eagle3.config.data import DataConfig, SourceConfig
from eagle3.data.sources import (
    hub_parts,
    pin_sources,
    read_source,
    source_name,
    source_version,
    without_paths,
)
from tests.helpers.signed_server import SIGNATURE, signed_server


def write(path: Path, *prompts: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts))
    return path


def prompts_of(**source: Any) -> list[tuple[str, str]]:
    return [(r.where, r.row["prompt"]) for r in read_source(SourceConfig(**source)) if r.row]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A data set org/chats in the working directory, where `datasets` looks before it asks the hub."""
    from huggingface_hub import HfApi

    monkeypatch.chdir(tmp_path)
    write(tmp_path / "org/chats/main/train.jsonl", "one", "two")
    write(tmp_path / "org/chats/main/test.jsonl", "three")
    write(tmp_path / "org/chats/short/train.jsonl", "four")
    config = ["---", "configs:"]
    for name in ("main", "short"):
        config += [f"- config_name: {name}", f"  default: {str(name == 'main').lower()}", "  data_files:"]
        config += [f"  - split: train\n    path: {name}/train.jsonl"]
    config += ["  - split: test\n    path: main/test.jsonl", "---", ""]
    (tmp_path / "org/chats/README.md").write_text("\n".join(config))
    commits: dict[str | None, str] = {None: "c0", "v1": "c1"}
    monkeypatch.setattr(
        HfApi, "dataset_info", lambda _, name, revision, timeout: SimpleNamespace(sha=commits[revision])
    )
    return commits


def test_a_hub_data_set_streams_its_split_and_subset(hub: Any) -> None:
    name = "org/chats:train"
    assert prompts_of(path=name) == [(f"{name}, row 1", "one"), (f"{name}, row 2", "two")]
    assert [p for _, p in prompts_of(path="org/chats:short:train")] == ["four"]


def test_a_hub_data_set_is_its_commit(hub: Any) -> None:
    assert source_version(SourceConfig(path="org/chats:train")) == "c0"
    assert source_version(SourceConfig(path="org/chats:train", revision="v1")) == "c1"
    hub[None] = "c2"
    assert source_version(SourceConfig(path="org/chats:train")) == "c2"


def test_datasets_is_asked_for_the_pinned_commit(
    hub: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import datasets

    asked: list[Any] = []
    monkeypatch.setattr(
        datasets, "load_dataset", lambda *a, **k: asked.append((a, k)) or iter([{"prompt": "x"}])
    )
    sources = [
        SourceConfig(path="org/chats:short:train", revision="v1"),
        SourceConfig(path=str(write(tmp_path / "a.jsonl", "a"))),
    ]
    pinned = pin_sources(sources, [source_version(source) for source in sources])
    assert pinned[1] == sources[1]
    list(read_source(pinned[0]))
    assert asked == [(("org/chats", "short"), {"split": "train", "streaming": True, "revision": "c1"})]


@pytest.mark.parametrize("path", ["org/chats:nosplit", "org/gone:train", "org/chats:nosubset:train"])
def test_a_hub_data_set_that_does_not_exist_is_an_error(
    hub: Any, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises((ValueError, ConnectionError), match=re.escape(path.partition(":")[0])):
        list(read_source(SourceConfig(path=path)))


@pytest.mark.parametrize(
    ("status", "kind"), [(429, ConnectionError), (503, ConnectionError), (404, ValueError), (403, ValueError)]
)
def test_only_a_hub_that_may_answer_later_is_asked_again_for_a_data_set(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, status: int, kind: type[Exception]
) -> None:
    import httpx
    from huggingface_hub import file_download
    from huggingface_hub.errors import HfHubHTTPError

    def fail(*args: object, **kwargs: object) -> None:
        request = httpx.Request("GET", "http://hub.invalid")
        raise HfHubHTTPError("refused", response=httpx.Response(status, request=request))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(file_download, "get_hf_file_metadata", fail)
    with pytest.raises(kind, match="data set example-org/absent, first row"):
        next(read_source(SourceConfig(path="example-org/absent:train", revision="c1")))


def test_a_data_set_with_a_loading_script_is_a_settings_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import HfApi

    monkeypatch.setattr(HfApi, "hf_hub_download", lambda *a, **k: "/cache/c1/README.md")
    with pytest.raises(ValueError, match=r"found scripted\.py; set the source's revision to refs/convert"):
        next(read_source(SourceConfig(path="example-org/scripted:train")))


def test_a_directory_is_all_its_files_in_the_order_of_their_paths(tmp_path: Path) -> None:
    write(tmp_path / "rows/b.jsonl", "two", "three")
    write(tmp_path / "rows/a/z.json", "one")
    pq.write_table(pa.table({"prompt": ["four"]}), tmp_path / "rows/c.parquet")
    write(tmp_path / "rows/.cache/x.jsonl", "hidden")
    write(tmp_path / "rows/_old.jsonl", "hidden")
    (tmp_path / "rows/README.md").write_text("no rows")
    assert prompts_of(path=str(tmp_path / "rows")) == [
        ("rows/a/z.json, line 1", "one"),
        ("rows/b.jsonl, line 1", "two"),
        ("rows/b.jsonl, line 2", "three"),
        ("rows/c.parquet, row 1", "four"),
    ]


def test_a_directory_at_a_url_is_read_and_identified_as_one_on_the_disk(tmp_path: Path) -> None:
    for name, prompt in (("a.jsonl", "one"), ("b.jsonl", "two")):
        path = write(tmp_path / "rows" / name, prompt)
        with fsspec.open(f"memory://store/rows/{name}", "wb") as f:
            f.write(path.read_bytes())
    assert prompts_of(path="memory://store/rows") == prompts_of(path=str(tmp_path / "rows"))
    here, there = (
        source_version(SourceConfig(path=p)) for p in (str(tmp_path / "rows"), "memory://store/rows")
    )
    assert here == there


def test_the_version_of_files_is_their_content(tmp_path: Path) -> None:
    def version(path: Path) -> str:
        return source_version(SourceConfig(path=str(path)))

    one, same = write(tmp_path / "x/a.jsonl", "one"), write(tmp_path / "y/b.jsonl", "one")
    assert version(one) == version(same)
    assert version(one) != version(write(tmp_path / "y/c.jsonl", "two"))
    before = version(tmp_path / "y")
    write(tmp_path / "y/d.jsonl", "three")
    assert version(tmp_path / "y") != before


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/nowhere/rows.jsonl", "no such file or directory, and not a hub data set"),
        ("rows.jsonl", "give a path, a URL or name[:subset]:split"),
        ("org/chats", "give a path, a URL or name[:subset]:split"),
        ("memory://nowhere/at/all", "has no JSONL, JSON or Parquet file"),
        ("nosuch://x/a.jsonl", "source nosuch://x/a.jsonl cannot be read (Protocol not known: nosuch"),
    ],
)
def test_a_path_that_is_no_source_is_an_error(path: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        source_version(SourceConfig(path=path))


@pytest.mark.parametrize(
    ("path", "parts"),
    [
        ("org/name:train", ("org/name", "", "train")),
        ("name:sub:train", ("name", "sub", "train")),
        ("s3://bucket/rows:1.jsonl", None),
    ],
)
def test_hub_names_differ_from_paths(path: str, parts: tuple[str, str, str] | None) -> None:
    assert hub_parts(path) == parts


@pytest.mark.parametrize("split", ["train[:10%]", "default:train[5:10]", "train[:10%](pct1_dropremainder)"])
def test_a_slice_of_a_split_is_refused_where_the_recipe_is_read(split: str) -> None:
    with pytest.raises(ValueError, match=r"whole split, got org/name:.*; drop the brackets and set max_rows"):
        SourceConfig(path=f"org/name:{split}")


def test_a_file_may_have_brackets_in_its_name(tmp_path: Path) -> None:
    path = str(write(tmp_path / "a:[1]", "x"))
    assert SourceConfig(path=path).path == path
    assert SourceConfig(path="s3://b/a:[1]").path == "s3://b/a:[1]"


def test_names_of_sources_hold_no_directories(tmp_path: Path) -> None:
    assert source_name(SourceConfig(path=str(write(tmp_path / "a.jsonl", "x")))) == "a.jsonl"
    assert source_name(SourceConfig(path=f"{tmp_path}/")) == tmp_path.name
    assert source_name(SourceConfig(path="org/chats:train")) == "org/chats:train"
    assert source_name(SourceConfig(path="s3://b/x.jsonl", name="mine")) == "mine"


@pytest.fixture
def signed(tmp_path: Path) -> Iterator[Any]:
    """A server of pre-signed URLs over tmp_path/there, and the signatures that hold."""
    accepted = ["s3cr3t", "s3cr3t2"]
    (tmp_path / "there").mkdir()
    with signed_server(tmp_path / "there", accepted) as url:
        yield SimpleNamespace(url=url, accepted=accepted, directory=tmp_path / "there")


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.parquet", "rows.jsonl.gz"])
def test_a_pre_signed_file_is_read_by_its_own_format_and_named_without_its_signature(
    signed: Any, name: str
) -> None:
    rows, file = [{"prompt": "one"}, {"prompt": "two"}], signed.directory / name
    if name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(rows), file)
    else:
        text = json.dumps(rows) if name.endswith(".json") else "".join(json.dumps(row) + "\n" for row in rows)
        file.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    source = SourceConfig(path=f"{signed.url}/{name}?{SIGNATURE}=s3cr3t")
    assert [(r.where.partition(",")[0], r.row) for r in read_source(source)] == [(name, row) for row in rows]
    assert source_version(source) == source_version(SourceConfig(path=str(file)))


def test_another_signature_is_the_same_source_in_all_keys(signed: Any) -> None:
    write(signed.directory / "rows.jsonl", "one")
    urls = [f"{signed.url}/rows.jsonl?{SIGNATURE}={signature}" for signature in signed.accepted]
    sources = [SourceConfig(path=url) for url in urls]
    assert {source_name(source) for source in sources} == {"rows.jsonl"}
    first, second = (without_paths(DataConfig(sources=[s], excluded=[s])).model_dump_json() for s in sources)
    assert first == second
    assert "s3cr3t" not in first
    assert source_version(sources[0]) == source_version(sources[1])


@pytest.mark.parametrize(
    ("name", "signature"),
    [
        ("rows.jsonl", "s3cr3t-old"),
        ("none.jsonl", "s3cr3t"),
        ("bad.jsonl", "s3cr3t"),
        ("bad.parquet", "s3cr3t"),
    ],
)
def test_errors_about_a_signed_url_do_not_show_its_signature(
    signed: Any, name: str, signature: str, caplog: pytest.LogCaptureFixture
) -> None:
    write(signed.directory / "rows.jsonl", "one")
    for bad in ("bad.jsonl", "bad.parquet"):
        (signed.directory / bad).write_text("no rows")
    source = SourceConfig(path=f"{signed.url}/{name}?{SIGNATURE}={signature}")
    with pytest.raises(
        ValueError, match=f"{name} is refused .*new signature" if signature == "s3cr3t-old" else name
    ) as e:
        list(read_source(source))
    assert "s3cr3t" not in "".join(traceback.format_exception(e.value)) + caplog.text


def test_a_source_without_a_path_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a path or a preset"):
        SourceConfig()
