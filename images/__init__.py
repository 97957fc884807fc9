"""The two container images, each from its lock file: CPU for data, GPU for engine and training.

Set EAGLE3_REGISTRY (for example registry.example.com/ml) to push and pull. Pods get the code when a workflow
starts (`--copy all`), or the images contain it (images/build.py); then EAGLE3_TAG is the code's version.
"""

import os
from pathlib import Path
from typing import cast

from flytekit import ImageSpec
from flytekit.constants import CopyFileDetection

ROOT = Path(__file__).resolve().parents[1]
TAG = os.environ.get("EAGLE3_TAG", "")
PYTHON_VERSION = "3.12"
BASE_IMAGE = "debian:12.11-slim"
UV_IMAGE = "ghcr.io/astral-sh/uv:0.13.9"


class LockFile(os.PathLike[str]):
    """Path of a lock file that opens from any directory.

    Its repr is the same on every machine, so that a laptop and a pod compute the same image tag.
    """

    def __init__(self, relative: str) -> None:
        self.relative = relative

    def __fspath__(self) -> str:
        return str(ROOT / self.relative)

    def __repr__(self) -> str:
        return repr(self.relative)


def _image(name: str, lock: str, apt_packages: list[str], pip_args: str = "") -> ImageSpec:
    return ImageSpec(
        name=name,
        registry=os.environ.get("EAGLE3_REGISTRY") or None,
        python_version=PYTHON_VERSION,
        base_image=BASE_IMAGE,
        requirements=cast(str, LockFile(lock)),
        # The locks are complete, without packages that vLLM requires but never imports.
        pip_extra_args=f"--no-deps {pip_args}".strip(),
        apt_packages=apt_packages,
        builder_config={"uv_image": UV_IMAGE},
        tag_format=f"{{spec_hash}}-{TAG}" if TAG else None,
        source_copy_mode=CopyFileDetection.NO_COPY,
    )


CPU = _image(
    "eagle3-cpu", "images/cpu.lock", ["ca-certificates", "libgomp1", "libnuma1"], "--torch-backend cpu"
)
# Triton and torch.compile call a C compiler at run time.
GPU = _image("eagle3-gpu", "images/gpu.lock", ["ca-certificates", "build-essential", "libnuma1"])
