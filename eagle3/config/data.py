"""Settings of the training data: sources of rows, prepare and the draft vocabulary."""

import re
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from eagle3.config.base import StageConfig, Uri

PresetName = Literal["", "sharegpt", "ultrachat", "magpie", "open_perfectblend", "toolace", "bfcl"]

# Presets whose files the hub cannot load as a data set.
PRESETS_WITHOUT_HUB = ("bfcl",)

# `datasets` cannot stream a slice of a split.
SLICED_SPLIT = re.compile(r"[^:]+:.*\[[^\]]*\](\([^)]*\))?")


class SourceConfig(StageConfig):
    """One source of rows."""

    path: Uri = Field(
        default="",
        description="file, directory, URL or hub data set as name[:subset]:split; empty: the preset's",
    )
    revision: str = Field(default="", description="hub branch, tag or commit; empty: the default branch")
    name: str = Field(default="", description="name in rows and report; empty: hub name or file name")
    preset: PresetName = Field(default="", description="format of a well-known data set; empty: detected")
    weight: float = Field(default=0.0, ge=0, description="relative share; for all sources or for none")
    max_rows: int = Field(default=0, ge=0, description="most rows to take, dropped ones not counted; 0: all")
    thinking: bool | None = Field(default=None, description="thinking in the template; null: its default")
    regenerate: bool = Field(default=True, description="false: this source keeps its own answers")

    @model_validator(mode="after")
    def _check_path(self) -> "SourceConfig":
        if not (self.path or self.preset):
            raise ValueError("a source needs a path or a preset, got neither; set one of them")
        if not self.path and self.preset in PRESETS_WITHOUT_HUB:
            raise ValueError(
                f"the hub cannot load preset {self.preset}; set path to its JSONL file or their directory"
            )
        is_sliced = SLICED_SPLIT.fullmatch(self.path) and "://" not in self.path
        if is_sliced and not Path(self.path).expanduser().exists():
            raise ValueError(
                f"a hub data set must be given with a whole split, got {self.path}; drop the brackets and "
                "set max_rows for the first rows of the split"
            )
        return self


class DataConfig(StageConfig):
    """prepare: turns rows into token shards."""

    sources: list[SourceConfig] = Field(
        default=[], description="more sources than `prompts`; without weights each fills its own shards"
    )
    excluded: list[SourceConfig] = Field(
        default=[], description="evaluation sets; rows with their prompts are dropped, as with `heldout`"
    )
    max_prompt_tokens: int = Field(
        default=2048, ge=1, description="longest prompt, tokens; rows with a longer one are dropped"
    )
    max_tokens: int = Field(
        default=4096,
        ge=2,
        description="longest row, tokens; longer ones are cut, after a turn if half of it stays",
    )
    rows_per_shard: int = Field(default=4096, ge=1, description="rows in a shard, one engine task each")
    min_shards: int = Field(default=1, ge=1, description="refuse sources that fill fewer shards than this")
    max_dropped_share: float = Field(
        default=0.5, ge=0, le=1, description="largest share of a source's rows that may be dropped"
    )
    seed: int = Field(default=0, description="seed of a weighted mix")
    workers: int = Field(default=0, ge=0, description="tokenizing processes; 0: one a CPU, up to 8")


class VocabConfig(StageConfig):
    """vocab: chooses the draft vocabulary."""

    size: int = Field(default=32000, ge=1, description="size of the draft vocabulary, at most the target's")
