"""The chain in a tenth of a second: the real wiring, tasks, local cache and kept places around engines and a
trainer that only pretend.

What they make changes with the settings of their own stage, so that no later stage stays cached by chance. It
does not change with engine and target, which several stages have in their keys: one that forgot them would
still run again, on another input.
"""

import json
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from flytekit.types.directory import FlyteDirectory
from test_agent_traces import TEMPLATE, chat, task

from eagle3 import export as exporting
from eagle3.config.engine import ExtractConfig, RegenerateConfig
from eagle3.config.training import ExportConfig
from eagle3.engine import engine as target_engine
from eagle3.engine.interface import EngineSettings
from eagle3.evaluation import benchmark
from eagle3.files import digest_of
from eagle3.shards.tokens import read_token_shard, write_token_shard
from eagle3.training import launch
from tests.helpers.exports import write_exported
from tests.helpers.factories import draft_config, layer_config
from tests.helpers.flyte_runs import pyflyte_run, write_recipe
from workflows.flyte import journal
from workflows.tasks.summarize_run import summarize_run

SOURCES: list[dict[str, Any]] = [{"path": f"{name}.jsonl", "name": name} for name in ("chats", "tasks")]
DRAFT, OTHER_TARGET, OTHER_TEMPLATE, EXCLUDED = (
    "draft",
    "other_target",
    "other.jinja",
    "excluded.jsonl",
)  # in the workplace
# Said here once more, and not read from eagle3.config: what leaves a draft as it is.
LEAVES_THE_DRAFT = {
    "device",
    "dtype",
    "processes",
    "disk_budget_bytes",
    "checkpoint_every",
    "init_from",
    "init_revision",
}


@dataclass
class Ran:
    """One run. made, cached: how often, by stage. places: what is kept by key lies there, by stage. inputs:
    of the last node."""

    made: Counter[str] = field(default_factory=Counter)
    cached: Counter[str] = field(default_factory=Counter)
    places: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    inputs: dict[str, Any] = field(default_factory=dict)


class StandIns:
    """Takes the place of what is slow; `ran` is the run that is going on."""

    ran: Ran

    def answer(
        self, _: EngineSettings, shard: str, out: str, log_uri: str, regenerate: RegenerateConfig, watch: Any
    ) -> dict[str, Any]:
        self._keep(log_uri)
        words = list(bytes.fromhex(digest_of(regenerate.model_dump_json())))
        rows = [
            replace(
                row,
                token_ids=row.token_ids + words,
                loss_mask=[False] * len(row.token_ids) + [True] * len(words),
                script="",
            )
            for row in read_token_shard(shard)
        ]
        return asdict(write_token_shard(out, rows)) | {
            "counts": {"requested": len(rows), "answered": len(rows)}
        }

    def capture(
        self, settings: EngineSettings, shard: str, out: str, extract: ExtractConfig, info: Any, watch: Any
    ) -> dict[str, Any]:
        self._keep(out)
        layers = list(settings.layer_ids or ())
        digest = digest_of(Path(shard).read_bytes(), str(layers), extract.model_dump_json())
        (Path(out) / "manifest.json").write_text(digest)
        return {"rows": 1, "tokens": 1, "supervised_tokens": 1, "bytes": 1, "digest": digest}

    def train(self, job: launch.TrainJob, report: Any) -> None:
        self._keep(job.out_dir)
        states = [(Path(place) / "manifest.json").read_text() for place in job.shard_dirs]
        learnt = job.cfg.model_dump_json(exclude=LEAVES_THE_DRAFT)
        initial = (Path(job.init_dir) / "model.safetensors").read_bytes() if job.init_dir else b""
        dtype = job.cfg.dtype.replace("auto", "float32")  # on this machine
        out = Path(job.out_dir)
        (out / "draft.json").write_text(
            digest_of(*states, Path(job.vocab_path).read_bytes(), learnt, dtype, initial)
        )
        for name in ("draft.safetensors", "metrics.jsonl"):
            (out / name).write_text(name)

    def export(self, draft: str, vocab: str, _: str, name: str, cfg: ExportConfig, out: str) -> str:
        digest = digest_of(
            (Path(draft) / "draft.json").read_text(), Path(vocab).read_bytes(), name, cfg.model_dump_json()
        )
        Path(out).mkdir()
        (Path(out) / "config.json").write_text(digest)
        return digest

    def evaluate(self, *inputs: Any, **how: Any) -> dict[str, Any]:
        Path(inputs[-1]).write_text("{}")
        figures: dict[str, Any] = {
            "acceptance_length": 1.5,
            "trainer_acceptance_length": 1.5,
            "outputs_identical": True,
        }
        return figures | {
            "acceptance_by_position": [0.5],
            "tokens_per_s": {"with_draft": 2.0, "without_draft": 1.0},
        }

    def summarize(self, **inputs: Any) -> FlyteDirectory:
        self.ran.inputs = inputs
        return FlyteDirectory(str(Path.cwd()))

    def _keep(self, place: str) -> None:
        path = Path(place)
        self.ran.places[path.name.partition("-")[0]].add(str(path))


@contextmanager
def standing_in() -> Iterator[StandIns]:
    """Put the stand-ins where they belong."""
    here = StandIns()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target_engine, "regenerate", here.answer)
        patch.setattr(target_engine, "capture", here.capture)
        patch.setattr(launch, "train_in_processes", here.train)
        patch.setattr(exporting, "write_export", here.export)
        patch.setattr(benchmark, "evaluate", here.evaluate)
        patch.setattr(summarize_run, "_task_function", here.summarize)
        yield here


def run(here: StandIns, recipe: Path) -> Ran:
    """Run the whole chain on a recipe."""
    here.ran = Ran()
    result = pyflyte_run(recipe)
    assert result.exit_code == 0, (result.output, result.exception)
    for entry in journal.entries():
        (here.ran.cached if entry.cached else here.ran.made)[entry.stage] += 1
    return here.ran


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    """A source's file; returns its path, as recipes have it."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


class Chain:
    """Runs of one recipe in one workplace, each with a change or two."""

    def __init__(self, workplace: Path, target: Path, here: StandIns) -> None:
        self.workplace, self.target, self.here = workplace, target, here
        (workplace / "template.jinja").write_text(TEMPLATE)
        (workplace / OTHER_TEMPLATE).write_text(TEMPLATE + "\n{# another #}")
        write_rows(workplace / "chats.jsonl", [chat(i) for i in range(2)])
        write_rows(workplace / "tasks.jsonl", [task(i) for i in range(2)])
        write_rows(workplace / EXCLUDED, [{"prompt": "Who?"}])
        shutil.copytree(target, workplace / OTHER_TARGET)
        (workplace / OTHER_TARGET / "generation_config.json").write_text('{"max_length": 99}')
        self.base = self.run()

    def write(self, num_prompts: int = 6, heldout: str = "", **blocks: Any) -> Path:
        """The recipe, and all that it reads."""
        prompts = [
            {"prompt": f"Say {i}.", "response": f"{i} it is, and is again."} for i in range(num_prompts)
        ]
        write_rows(self.workplace / "prompts.jsonl", prompts)
        base: dict[str, Any] = {
            "target": {"chat_template": "template.jinja"},
            "data": {"sources": SOURCES},
            "regenerate": {
                "sources": {"train": {"top_p": 0.8}, "tasks": {"temperature": 0.0}},
                "tool_parser": "hermes",
            },
            "train": {"dtype": "float32", "packs_per_step": 2},
        }
        merged = {name: base.get(name, {}) | blocks.get(name, {}) for name in base.keys() | blocks.keys()}
        recipe = write_recipe(
            self.workplace / "recipe.yaml", self.target, self.workplace / "prompts.jsonl", **merged
        )
        if heldout:
            recipe.write_text(yaml.safe_dump(yaml.safe_load(recipe.read_text()) | {"heldout": heldout}))
        return recipe

    def run(self, num_prompts: int = 6, **changes: Any) -> Ran:
        return run(self.here, self.write(num_prompts, **changes))


def initial_draft(chain: Chain) -> Path:
    """A draft for the tiny target, in the Speculators format."""
    root = chain.workplace / DRAFT
    if root.exists():
        return root / "export"
    root.mkdir()
    (root / "target").symlink_to(chain.target)
    layer = layer_config(vocab_size=json.loads((chain.target / "config.json").read_text())["vocab_size"])
    return write_exported(root, draft_config(layer), 3)
