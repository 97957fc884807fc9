"""All blocks of a recipe together, by the names they have there."""

from pydantic import Field

from eagle3.config.base import StageConfig
from eagle3.config.data import DataConfig, VocabConfig
from eagle3.config.engine import (
    EngineConfig,
    EvaluateConfig,
    ExtractConfig,
    FanOutConfig,
    RegenerateConfig,
    TargetConfig,
)
from eagle3.config.resources import ResourcesConfig
from eagle3.config.training import ExportConfig, TrainConfig


class RunSettings(StageConfig):
    """The settings of a run, one block for each stage."""

    target: TargetConfig = Field(description="the model that the draft is for")
    engine: EngineConfig = Field(default=EngineConfig(), description="how the target runs")
    data: DataConfig = Field(default=DataConfig(), description="prepare: rows to token shards")
    regenerate: RegenerateConfig = Field(default=RegenerateConfig(), description="the target's own answers")
    vocab: VocabConfig = Field(default=VocabConfig(), description="the draft vocabulary")
    extract: ExtractConfig = Field(default=ExtractConfig(), description="hidden states")
    train: TrainConfig = Field(default=TrainConfig(), description="the draft")
    export: ExportConfig = Field(default=ExportConfig(), description="the directory that vLLM loads")
    evaluate: EvaluateConfig = Field(
        default=EvaluateConfig(), description="acceptance and speed on held-out prompts"
    )
    fanout: FanOutConfig = Field(default=FanOutConfig(), description="replicas, GPUs and servers")
    resources: ResourcesConfig = Field(default=ResourcesConfig(), description="what pods ask for")
