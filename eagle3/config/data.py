"""Settings of what is trained on: sources of rows, prepare and the draft vocabulary."""

from typing import Literal

from pydantic import Field, model_validator

from eagle3.config.base import StageConfig, Uri

PresetName = Literal["", "sharegpt", "ultrachat", "magpie", "open_perfectblend", "toolace", "bfcl"]


# Their files are no data set that the hub loads.
PRESETS_WITHOUT_PLACE = ("bfcl",)


class SourceConfig(StageConfig):
    """One source of rows."""

    path: Uri = Field(
        default="",
        description="hub data set as name[:subset]:split, file, directory or URL; empty: where the preset's data set lies",
    )
    revision: str = Field(
        default="", description="hub revision (branch, tag or commit); empty means the default branch"
    )
    name: str = Field(
        default="",
        description="name in rows and report; empty: the hub name or the file's name without directories",
    )
    preset: PresetName = Field(
        default="", description="mapping for a well-known data set; empty: the rows' format is recognised"
    )
    weight: float = Field(
        default=0.0,
        ge=0,
        description="share of the mix, relative to the other sources; all have one or none has",
    )
    max_rows: int = Field(default=0, ge=0, description="rows taken at most, dropped ones not counted; 0: all")
    thinking: bool | None = Field(
        default=None, description="thinking switched on or off in the template; null: its own default"
    )
    regenerate: bool = Field(
        default=True, description="false: the rows' own answers are kept where the others are regenerated"
    )

    @model_validator(mode="after")
    def _check_place(self) -> "SourceConfig":
        if not (self.path or self.preset):
            raise ValueError(
                "a source needs a path or a preset, got neither; name a file, a directory, a URL or a hub data set"
            )
        if not self.path and self.preset in PRESETS_WITHOUT_PLACE:
            raise ValueError(
                f"the preset {self.preset} has no place on the hub; give path, a file or directory with its JSONL files"
            )
        return self


class DataConfig(StageConfig):
    """prepare: rows to token shards."""

    sources: list[SourceConfig] = Field(
        default=[],
        description="sources besides `prompts`; without weights one after another, each in shards of its own",
    )
    excluded: list[SourceConfig] = Field(
        default=[],
        description="evaluation sets: conversations with one of their prompts are dropped, as with `heldout`",
    )
    max_prompt_tokens: int = Field(
        default=2048, ge=1, description="rows whose prompt is longer are dropped and counted"
    )
    max_tokens: int = Field(
        default=4096,
        ge=2,
        description="rows with answers are cut to this many tokens, behind a whole turn if half of them stay",
    )
    rows_per_shard: int = Field(default=4096, ge=1, description="rows in one shard: one engine task")
    min_shards: int = Field(default=1, ge=1, description="refuse sources that fill fewer shards than this")
    max_dropped_share: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="share of a source's rows that may be dropped before the task fails",
    )
    seed: int = Field(default=0, description="order of sources in a weighted mix")
    workers: int = Field(
        default=0,
        ge=0,
        description="processes that tokenize; 0: one for each CPU, at most 8; no result depends on it",
    )


class VocabConfig(StageConfig):
    """vocab: the draft vocabulary."""

    size: int = Field(default=32000, ge=1, description="draft vocabulary size K, at most the target's")
