"""README, CONTRIBUTING and docs/ are true: their commands run, their paths, links and settings exist, their words are plain.

Long commands are rehearsed: make prints its plan; of `pyflyte run` the workflow, the options and the recipe are checked.
"""

import ast
import importlib
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import yaml
from click.testing import CliRunner
from flytekit.clis.sdk_in_container.pyflyte import main as pyflyte

from eagle3.config.base import StageConfig
from eagle3.config.run import RunSettings
from eagle3.config.training import PromoteConfig
from workflows.flyte.recipe import Recipe

ROOT = Path(__file__).resolve().parents[1]
DOCS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
README_LINES = 140
PYTHON = Path(sys.executable)
# Words that house style replaces; whole words, any case.
BANNED = (
    "anew|alike|whoever|nobody|beside|goes on|go on|told apart|as it stands|hands? on|whole or not at all|faults that pass"
    "|distrust|it lies|lies in|stands in|is told|behind which"
)

MODULES = {".".join(p.relative_to(ROOT).with_suffix("").parts) for p in (ROOT / "eagle3").rglob("*.py")}


def names() -> list[str]:
    return [str(path.relative_to(ROOT)) for path in DOCS]


def commands_in(text: str) -> Iterator[str]:
    """The lines of a text's bash blocks, without comments."""
    for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL):
        for line in block.splitlines():
            if command := line.split("  #")[0].strip():
                yield command


def all_commands() -> list[str]:
    """Every command once, in the order in which a reader meets them."""
    return list(dict.fromkeys(command for path in DOCS for command in commands_in(path.read_text())))


def prose_of(text: str) -> str:
    """A text without code blocks and code spans."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


def subcommand_of(words: list[str]) -> list[str]:
    """The leading words of a pyflyte command that name what it runs: for `run` the file and the workflow too."""
    if words[0] != "run":
        return words[:1]
    script = next(i for i, word in enumerate(words) if word.endswith(".py"))
    assert (ROOT / words[script]).is_file()
    return ["run", *words[script : script + 2]]


def check_pyflyte(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What the command names exists, it takes every option that is given, and files given as options exist."""
    monkeypatch.chdir(ROOT)
    asked = subcommand_of(words)
    for i in range(1, len(asked) + 1):
        if asked[i - 1].endswith(".py"):
            continue
        shown = CliRunner().invoke(pyflyte, [*asked[:i], "--help"], terminal_width=200)
        assert shown.exit_code == 0, shown.output
        if i == 1:
            general = shown.output
    options = [word for word in words if word.startswith("--")]
    assert [option for option in options if option not in general + shown.output] == []
    assert [word for word in words if word.endswith(".yaml") and not (ROOT / word).is_file()] == []


def rehearsal(command: str, scratch: Path) -> str:
    """A command that costs seconds in place of one that costs minutes; writes go to scratch."""
    words = shlex.split(command)
    if words[0] == "make":
        return shlex.join(["make", "-n", *words[1:]])
    return command.replace(".venv/bin/", f"{PYTHON.parent}/").replace("runs/", f"{scratch}/")


def with_marks(command: str) -> Any:
    """Packaging compiles every workflow."""
    return pytest.param(command, marks=pytest.mark.slow if "pyflyte" in command else (), id=command)


@pytest.mark.parametrize("command", list(map(with_marks, all_commands())))
def test_a_command_works(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = shlex.split(command)
    if words[0].endswith("/pyflyte") and words[1] in ("run", "fetch", "register"):
        check_pyflyte(words[1:], monkeypatch)
        return
    if words[1:3] == ["-m", "pytest"]:
        assert (ROOT / words[-1]).exists()
        return
    if words[1] == "-m" and words[2].startswith("tests.benchmarks."):
        assert importlib.util.find_spec(words[2])
        return
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
    text = "\n".join(commands_in((ROOT / "README.md").read_text()))
    for needed in ("make smoke", "plan.py", "pyflyte run --remote"):
        assert needed in text


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES


@pytest.mark.parametrize("name", names())
def test_every_path_that_is_named_exists(name: str) -> None:
    text = (ROOT / name).read_text()
    folders = r"(?:eagle3|workflows|images|tests|docs|\.ci|\.github)"
    named = re.findall(rf"`({folders}/[\w./*-]*)`", text)
    assert [path for path in named if not list(ROOT.glob(path.rstrip("/")))] == []


@pytest.mark.parametrize("name", names())
def test_every_relative_link_leads_somewhere(name: str) -> None:
    broken = []
    for link in re.findall(r"\]\(([^)]+)\)", (ROOT / name).read_text()):
        path, _, anchor = link.partition("#")
        target = (ROOT / name).parent / path if path else ROOT / name
        if "://" not in link and not (target.is_file() and (not anchor or anchor in anchors(target))):
            broken.append(link)
    assert broken == []


def anchors(path: Path) -> set[str]:
    """The anchors that GitHub gives a file's headings."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", names())
def test_words_are_plain(name: str) -> None:
    prose = prose_of((ROOT / name).read_text())
    assert re.findall(rf"\b(?:{BANNED})\b", prose, re.IGNORECASE) == []


@pytest.mark.parametrize("name", names())
def test_every_setting_that_is_named_exists(name: str) -> None:
    fields = settings()
    named = re.findall(
        rf"`((?:{'|'.join(fields)})\.(?!html|json|safetensors)\w+)(?:\.\w+)?[`:]", (ROOT / name).read_text()
    )
    assert [key for key in named if key.partition(".")[2] not in fields[key.partition(".")[0]]] == []


def settings() -> dict[str, set[str]]:
    """The blocks of a recipe, and `promote`, with their keys."""
    return {name: set(model.model_fields) for name, model in models().items()}


def models() -> dict[str, type[StageConfig]]:
    blocks = get_type_hints(RunSettings) | {"promote": PromoteConfig}
    return {k: t for k, t in blocks.items() if isinstance(t, type) and issubclass(t, StageConfig)}


@pytest.mark.parametrize("name", names())
def test_every_example_of_settings_is_accepted(name: str) -> None:
    for block in re.findall(r"```yaml\n(.*?)```", (ROOT / name).read_text(), re.DOTALL):
        for key, values in yaml.safe_load(block).items():
            models()[key](**values)


def hops() -> list[tuple[str, str, str]]:
    """Task, first hop and second hop of each row in CONTRIBUTING's table."""
    rows = re.findall(
        r"^\| `(workflows\.tasks\.\w+)` \| `([\w.]+)` \| `([\w.]+)` \|$",
        (ROOT / "CONTRIBUTING.md").read_text(),
        re.MULTILINE,
    )
    return [(task, first, second) for task, first, second in rows]


def names_used_in(module: str) -> set[str]:
    """Every name, attribute, import and string in a module's source."""
    used: set[str] = set()
    for node in ast.walk(ast.parse((ROOT / module.replace(".", "/")).with_suffix(".py").read_text())):
        used |= {value for _, value in ast.iter_fields(node) if isinstance(value, str)}
    return used


def test_every_task_of_a_stage_has_its_hops() -> None:
    stages = re.findall(r"^\| \w+ \| `(\w+)` \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(stages) == 7
    assert {f"workflows.tasks.{stage}" for stage in stages} <= {task for task, _, _ in hops()}


@pytest.mark.parametrize(("task", "first", "second"), hops())
def test_the_work_of_a_task_is_two_hops_away(task: str, first: str, second: str) -> None:
    for dotted in (first, second):
        module, _, name = dotted.rpartition(".")
        assert hasattr(importlib.import_module(module), name), dotted
    assert first.rpartition(".")[2] in names_used_in(task)
    found = names_used_in(first.rpartition(".")[0])
    for started in found & MODULES:  # as `python -m`
        found = found | names_used_in(started)
    assert second.rpartition(".")[2] in found


@pytest.mark.parametrize(
    ("workflow", "node"),
    re.findall(r"^\| `(\w+)` \| `(n\d+)` \|$", (ROOT / "docs/cluster.md").read_text(), re.MULTILINE),
)
def test_the_summary_is_the_node_that_the_docs_name(workflow: str, node: str) -> None:
    module = "workflows.retrain_eagle3" if workflow == "retrain_eagle3" else "workflows.train_eagle3"
    nodes = getattr(importlib.import_module(module), workflow).nodes
    assert [n.id for n in nodes if n.flyte_entity.name.endswith(".summarize_run")] == [node]


def test_a_missing_file_is_refused_with_the_message_in_the_docs() -> None:
    (message,) = re.findall(r"`(prompts must be [^`]*)`", (ROOT / "docs/cluster.md").read_text())
    heldout = str(ROOT / "workflows/recipes/heldout.jsonl")
    with pytest.raises(ValueError, match=re.escape(message.replace("<file>", "nowhere.jsonl"))):
        Recipe.model_validate(
            {"target": {"name": "org/name"}, "heldout": heldout, "prompts": "nowhere.jsonl"}
        )
