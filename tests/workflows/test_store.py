"""The local store and the cache guard."""

import os
import re
import runpy
import subprocess
from pathlib import Path

import pytest
from flytekit import Cache, task
from flytekit.types.directory import FlyteDirectory

from tests.helpers.flyte_runs import ROOT
from workflows.flyte import clean_store, journal, store, store_size
from workflows.flyte.interfaces import DraftExport
from workflows.flyte.stage import stage


@task(cache=Cache(version="1"))
@stage
def write_export(text: str) -> DraftExport:
    out = store.new_dir("export")
    (out / "file").write_text(text)
    return DraftExport(FlyteDirectory(str(out)), text)


def run(text: str) -> tuple[Path, bool]:
    """Where the output lies, and whether it came from the cache."""
    journal.start()
    made = write_export(text=text)
    return Path(made.directory.path), journal.entries()[-1].cached


def test_outputs_lie_in_the_store_and_come_back(workplace: Path) -> None:
    path, cached = run("a")
    assert path.parent == workplace / "store"
    assert not cached
    assert run("a") == (path, True)


@pytest.mark.parametrize("loss", ["directory", "content"])
def test_an_entry_whose_files_are_gone_is_a_miss(workplace: Path, loss: str) -> None:
    path, _ = run(loss)
    (path / "file").unlink()
    if loss == "directory":
        path.rmdir()
    again, cached = run(loss)
    assert not cached
    assert (again / "file").read_text() == loss
    assert run(loss) == (again, True)


def test_every_output_has_a_directory_of_its_own(workplace: Path) -> None:
    assert len({store.new_dir("x") for _ in range(3)}) == 3


def test_the_clusters_storage_settings_reach_child_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("FLYTE_AWS_ENDPOINT", "http://storage.invalid")
    monkeypatch.setenv("FLYTE_AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "the user's own")
    store.share_credentials()
    assert os.environ["AWS_ENDPOINT_URL"] == "http://storage.invalid"
    assert os.environ["AWS_ACCESS_KEY_ID"] == "key"
    assert os.environ["AWS_SECRET_ACCESS_KEY"] == "the user's own"


def filled(root: Path) -> Path:
    """A store with an output, states that a key names, and unfinished training."""
    for name in (
        "target-0123456789ab",
        f"extract_hidden_states-{'0f' * 16}",
        f"train_draft-{'f0' * 16}.unfinished",
    ):
        (root / name).mkdir(parents=True)
        (root / name / "file").touch()
    (root / f"train_draft-{'f0' * 16}.unfinished.lock").touch()
    return root


@pytest.mark.parametrize("place", ["~/named by a user", "{path}/absolute", ""])
def test_cleaning_removes_the_store_that_runs_write_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("EAGLE3_STORE", place.format(path=tmp_path))
    root = filled(store.root())
    assert tmp_path in root.parents
    for said in ("is removed", "is not there: nothing to remove"):
        runpy.run_module("workflows.flyte.clean_store", run_name="__main__")
        assert not root.exists()
        assert root.parent.exists()
        assert f"{root} {said}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "other", ["notes.txt", "src/", "target/", "target-0123456789ab.old/", ".git/", "train_draft-0123456789ab"]
)
@pytest.mark.parametrize("is_filled", [True, False])
def test_a_directory_that_holds_something_else_is_not_removed(
    tmp_path: Path, other: str, is_filled: bool
) -> None:
    root = filled(tmp_path / "store") if is_filled else tmp_path / "store"
    root.mkdir(exist_ok=True)
    (root / other).mkdir() if other.endswith("/") else (root / other).touch()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=f"holds {re.escape(other.rstrip('/'))}; correct EAGLE3_STORE"):
        clean_store.clean(root)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_file_or_a_link_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="holds file"):
        clean_store.clean(tmp_path / "file")
    filled(tmp_path / "other")
    (tmp_path / "store").mkdir()
    (tmp_path / "store/train_draft-0123456789ab").symlink_to(tmp_path / "other")
    with pytest.raises(ValueError, match="holds train_draft-0123456789ab"):
        clean_store.clean(tmp_path / "store")
    assert (tmp_path / "other/target-0123456789ab/file").exists()


@pytest.mark.slow
def test_cleaning_by_make_ends_with_the_fault(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.tex").touch()
    environment = os.environ | {"EAGLE3_STORE": "~/mine", "HOME": str(tmp_path)}
    done = subprocess.run(
        ["make", "clean-cache"], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode != 0
    assert "mine holds thesis.tex" in done.stderr
    assert (tmp_path / "mine/thesis.tex").exists()


def test_the_size_report_counts_stages_unfinished_work_and_what_nothing_leads_to(
    workplace: Path, tmp_path: Path
) -> None:
    path, _ = run("sized")
    root = tmp_path / "store"
    key, own = "0123456789abcdef" * 2, "0123456789ab"
    files = {
        f"train_draft-{own}/draft": 100,
        f"train_draft-{key}.unfinished/checkpoint": 20,
        f"extract_hidden_states-{key}/chunk-00000-x.safetensors": 3000,
        f"extract_hidden_states-{key[::-1]}/chunk-00000-x.safetensors": 400,
        f"extract_hidden_states-{key[::-1]}/manifest.json": 5,
        f"regenerate_responses-{key}/answers-00000.jsonl": 6,
        f"export_draft-{own}/eagle3/model": 70_000,
    }
    for name, size in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"x" * size)
    held = store_size.survey(root, {f"{root}/train_draft-{own}", "s3://elsewhere/x", f"{path}"})
    by_kind = {
        kind: sum(h.size_bytes for h in held if h.kind == kind) for kind in ("", "unfinished", "unused")
    }
    assert by_kind == {"": 100 + 405 + 6, "unfinished": 20 + 3000, "unused": 70_000}
    by_stage = {
        stage: sum(h.size_bytes for h in held if h.stage == stage) for stage in {h.stage for h in held}
    }
    assert by_stage["train_draft"] == 120
    assert by_stage["extract_hidden_states"] == 3405
    assert "0.1 MB   what make clean-cache frees" in store_size.render(root, held)
    assert str(path) in store_size.cached_paths()
