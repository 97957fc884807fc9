"""The README's commands do what they say: each line of its bash blocks is run, the long ones as far as they cost no minutes."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def commands() -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    lines = [line.split("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line]


def rehearsal(command: str, scratch: Path) -> str:
    """What stands in for a command: make shows its plan, a run shows that its workflow is there, writes go to scratch."""
    words = shlex.split(command.replace(".venv/bin/", f"{Path(sys.executable).parent}/"))
    if words[0] == "make":
        return shlex.join(["make", "-n", *words[1:]])
    if "--inputs-file" in words:
        recipe = words[words.index("--inputs-file") + 1]
        assert (ROOT / recipe).is_file()
        words = [*words[: words.index("--inputs-file")], "--help"]
        words = [w for w in words if w not in ("--remote", "--copy", "all")]
    return shlex.join(words).replace("runs/", f"{scratch}/")


@pytest.mark.parametrize("command", commands())
def test_a_command_of_the_readme_works(command: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").touch()
    environment = {**os.environ, "HOME": str(tmp_path), "EAGLE3_STORE": str(tmp_path / "store")}
    done = subprocess.run(
        ["bash", "-euc", rehearsal(command, tmp_path)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_readme_has_the_commands_that_are_promised() -> None:
    text = "\n".join(commands())
    for needed in ("make smoke", "make test", "make lint", "pyflyte run --remote", "package"):
        assert needed in text


def test_every_path_that_the_readme_names_exists() -> None:
    named = re.findall(r"`((?:eagle3|workflows|images|tests)/[\w./]*)`", README)
    assert named
    assert not re.findall(r"@[A-Z]+@", README)
    missing = [path for path in named if not (ROOT / path).exists()]
    assert not missing
