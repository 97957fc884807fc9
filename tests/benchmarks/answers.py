"""What both halves of `make bench-capture` work on: a recipe's target, and its prompts with the target's own answers.

Made by the library's own stages, once: directories carry a digest of all that decides their content.

    {out}/target-{digest}/                     config, tokenizer, safetensors
    {out}/answers-{digest}/shard-00000.parquet …
"""

import argparse
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from eagle3.config.data import DataConfig, SourceConfig
from eagle3.config.engine import EngineConfig, RegenerateConfig, TargetConfig
from eagle3.data.prepare import prepare_shards
from eagle3.engine import engine as target_engine
from eagle3.engine.interface import EngineSettings
from eagle3.files import digest_of
from eagle3.targets.resolve import fetch_target, identify_target

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Answers:
    """recipe: the YAML file's content. target_dir: the target's files. shards: token shards with answers, in order."""

    recipe: dict[str, Any]
    target_dir: Path
    shards: list[Path]

    @property
    def engine(self) -> EngineConfig:
        """The recipe's engine."""
        return EngineConfig(**self.recipe.get("engine", {}))


def read_arguments(description: str | None) -> argparse.ArgumentParser:
    """Arguments that both halves take."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--recipe", type=Path, default=ROOT / "workflows" / "recipes" / "smoke.yaml")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "bench")
    parser.add_argument(
        "--target", type=Path, help="a target directory, instead of the recipe's target converted"
    )
    parser.add_argument(
        "--shards",
        type=Path,
        nargs="+",
        help="answered token shards, instead of the recipe's prompts answered",
    )
    return parser


def make_answers(arguments: argparse.Namespace) -> Answers:
    """Take what the arguments name and make what they leave out."""
    recipe = yaml.safe_load(arguments.recipe.read_text())
    target = TargetConfig(**recipe["target"])
    if arguments.target is None:
        digest = identify_target(target)[2]
        target_dir = _made_once(
            arguments.out / f"target-{digest[:12]}", lambda out: fetch_target(target, out)
        )
    else:
        target_dir, digest = arguments.target, identify_target(TargetConfig(name=str(arguments.target)))[2]
    if arguments.shards:
        return Answers(recipe, target_dir, arguments.shards)
    settings = [str(sorted(recipe.get(stage, {}).items())) for stage in ("engine", "data", "regenerate")]
    texts = [Path(recipe[name]).read_bytes() for name in ("prompts", "heldout")]
    directory = arguments.out / f"answers-{digest_of(digest, *settings, *texts)[:12]}"
    _made_once(directory, lambda out: _answer(recipe, target_dir, out))
    return Answers(recipe, target_dir, sorted(directory.glob("shard-*.parquet")))


def _answer(recipe: dict[str, Any], target_dir: Path, out: Path) -> None:
    engine, cfg = EngineConfig(**recipe.get("engine", {})), RegenerateConfig(**recipe.get("regenerate", {}))
    heldout = SourceConfig(path=recipe["heldout"], name="heldout")
    data = DataConfig(**recipe["data"], sources=[SourceConfig(path=recipe["prompts"], name="train")])
    prepared = prepare_shards(heldout, target_dir, data, True, out)
    settings = EngineSettings.from_dirs(target_dir, engine)
    for file in prepared.shards:
        log_uri = str(out / f"log-{file.path.stem}")
        target_engine.regenerate(settings, file.path, file.path, log_uri, cfg)
    target_engine.stop()


def _made_once(directory: Path, make: Callable[[Path], None]) -> Path:
    """The directory, filled by `make` unless an earlier run did; whole or not at all."""
    if not directory.exists():
        part = directory.with_name(directory.name + ".part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        make(part)
        part.rename(directory)
    return directory
