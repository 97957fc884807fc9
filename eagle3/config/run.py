"""The blocks of a recipe."""

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

    target: TargetConfig
    engine: EngineConfig = EngineConfig()
    data: DataConfig = DataConfig()
    regenerate: RegenerateConfig = RegenerateConfig()
    vocab: VocabConfig = VocabConfig()
    extract: ExtractConfig = ExtractConfig()
    train: TrainConfig = TrainConfig()
    export: ExportConfig = ExportConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    fanout: FanOutConfig = FanOutConfig()
    resources: ResourcesConfig = ResourcesConfig()
