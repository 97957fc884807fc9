"""Sources: places and versions, directories, and hub data sets.

No test reaches the hub: its answer about a commit is made up, and `datasets` streams a directory of the same layout.
"""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eagle3.config import SourceConfig
from eagle3.data.sources import hub_parts, pin_sources, read_source, resolve_source, source_name


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
    monkeypatch.setattr(HfApi, "dataset_info", lambda _, name, revision, timeout: SimpleNamespace(sha=commits[revision]))
    return commits


def test_a_hub_data_set_streams_its_split_and_subset(hub: Any) -> None:
    name = "org/chats:train"
    assert prompts_of(path=name) == [(f"{name}, row 1", "one"), (f"{name}, row 2", "two")]
    assert [p for _, p in prompts_of(path="org/chats:short:train")] == ["four"]


def test_a_hub_data_set_is_its_commit(hub: Any) -> None:
    assert resolve_source(SourceConfig(path="org/chats:train")) == ("org/chats:train", "c0")
    assert resolve_source(SourceConfig(path="org/chats:train", revision="v1")) == ("org/chats:train", "c1")
    hub[None] = "c2"
    assert resolve_source(SourceConfig(path="org/chats:train"))[1] == "c2"


def test_the_pinned_commit_is_what_datasets_is_asked_for(hub: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import datasets

    asked: list[Any] = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: asked.append((a, k)) or iter([{"prompt": "x"}]))
    sources = [
        SourceConfig(path="org/chats:short:train", revision="v1"),
        SourceConfig(path=str(write(tmp_path / "a.jsonl", "a"))),
    ]
    pinned = pin_sources(sources, [resolve_source(source)[1] for source in sources])
    assert pinned[1] == sources[1]
    list(read_source(pinned[0]))
    assert asked == [(("org/chats", "short"), {"split": "train", "streaming": True, "revision": "c1"})]


@pytest.mark.parametrize("path", ["org/chats:nosplit", "org/gone:train", "org/chats:nosubset:train"])
def test_a_hub_data_set_that_is_not_there_is_an_error(hub: Any, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises((ValueError, ConnectionError), match=re.escape(path.partition(":")[0])):
        list(read_source(SourceConfig(path=path)))


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
    here, there = (resolve_source(SourceConfig(path=p))[1] for p in (str(tmp_path / "rows"), "memory://store/rows"))
    assert here == there


def test_the_version_of_files_is_their_content(tmp_path: Path) -> None:
    def version(path: Path) -> str:
        return resolve_source(SourceConfig(path=str(path)))[1]

    one, same = write(tmp_path / "x/a.jsonl", "one"), write(tmp_path / "y/b.jsonl", "one")
    assert version(one) == version(same)
    assert version(one) != version(write(tmp_path / "y/c.jsonl", "two"))
    before = version(tmp_path / "y")
    write(tmp_path / "y/d.jsonl", "three")
    assert version(tmp_path / "y") != before


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/nowhere/rows.jsonl", "no such file or directory, and not a hub data set"),
        ("rows.jsonl", "give a path, a URL or name[:subset]:split"),
        ("org/chats", "give a path, a URL or name[:subset]:split"),
        ("memory://nowhere/at/all", "has no JSONL, JSON or Parquet file"),
        ("nosuch://x/a.jsonl", "source nosuch://x/a.jsonl cannot be read (Protocol not known: nosuch"),
    ],
)
def test_a_place_that_is_none_is_an_error(path: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        resolve_source(SourceConfig(path=path))


@pytest.mark.parametrize(
    ("path", "parts"),
    [
        ("org/name:train", ("org/name", "", "train")),
        ("name:sub:train", ("name", "sub", "train")),
        ("org/name:default:train[:10%]", ("org/name", "default", "train[:10%]")),
        ("s3://bucket/rows:1.jsonl", None),
    ],
)
def test_hub_names_are_told_from_paths(path: str, parts: tuple[str, str, str] | None) -> None:
    assert hub_parts(path) == parts


def test_names_of_sources_hold_no_directories(tmp_path: Path) -> None:
    assert source_name(SourceConfig(path=str(write(tmp_path / "a.jsonl", "x")))) == "a.jsonl"
    assert source_name(SourceConfig(path=f"{tmp_path}/")) == tmp_path.name
    assert source_name(SourceConfig(path="org/chats:train")) == "org/chats:train"
    assert source_name(SourceConfig(path="s3://b/x.jsonl", name="mine")) == "mine"


def test_a_source_without_a_place_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a path or a preset"):
        SourceConfig()
