"""Write build contexts of both images with the code inside, for clusters that cannot copy code to pods.

    python -m images.build DIRECTORY    writes one context for each image and prints `name directory`

`make image` builds them with docker or podman. EAGLE3_TAG is required: the image's hash ignores the code.
"""

import shutil
import sys
from pathlib import Path

from flytekit import ImageSpec
from flytekit.image_spec.default_builder import create_docker_context

import images

CODE = ("eagle3", "workflows", "images")
LAST_LAYER = "COPY --chown=flytekit code /root\n"


def write_context(image: ImageSpec, directory: Path) -> None:
    """Write the context of flytekit's builder, with the code as the last layer."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    create_docker_context(image, directory)
    no_caches = shutil.ignore_patterns("__pycache__")
    for name in CODE:
        shutil.copytree(images.ROOT / name, directory / "code" / name, ignore=no_caches)
    with open(directory / "Dockerfile", "a") as file:
        file.write(LAST_LAYER)


def main(directory: Path) -> None:
    if not images.TAG:
        sys.exit("set EAGLE3_TAG to the version of the code in the images")
    for image in (images.CPU, images.GPU):
        write_context(image, directory / image.name)
        print(image.image_name(), directory / image.name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
