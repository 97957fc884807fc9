"""Checks across stages that need only settings; eagle3/planning/preflight.py has those with the target."""

from eagle3.config.data import DataConfig
from eagle3.config.engine import EngineConfig, EvaluateConfig, RegenerateConfig
from eagle3.config.resources import ResourcesConfig
from eagle3.config.training import TrainConfig


def check_sampled_sources(regenerate: RegenerateConfig, names: list[str]) -> None:
    """Refuse sampling settings for sources that are not among the `names` of the run."""
    if unknown := sorted(regenerate.sources.keys() - set(names)):
        raise ValueError(
            f"regenerate.sources must name sources of this run ({', '.join(names)}), got "
            f"{', '.join(unknown)}; correct the names"
        )


def check_processes(train: TrainConfig, resources: ResourcesConfig) -> None:
    """Refuse packs that cannot be divided among the trainer's GPUs."""
    gpus = resources.trainer.gpus
    if train.packs_per_step % gpus:
        raise ValueError(
            f"train.packs_per_step must be a multiple of resources.trainer.gpus {gpus}, got "
            f"{train.packs_per_step}: each GPU needs a pack in every step"
        )


def check_lengths(
    data: DataConfig, engine: EngineConfig, regenerate: RegenerateConfig, evaluate: EvaluateConfig
) -> None:
    """Refuse settings with which a prompt that passes prepare would not fit a later stage."""
    # Speculation reads up to 2k tokens past an answer; closer to the limit the engine makes fewer guesses.
    overhang = 2 * evaluate.num_speculative_tokens
    prompt = data.max_prompt_tokens
    needed = {
        "data.max_prompt_tokens + evaluate.max_new_tokens + 2k": prompt + evaluate.max_new_tokens + overhang
    }
    if regenerate.enabled:
        needed["data.max_prompt_tokens + regenerate.max_new_tokens"] = prompt + regenerate.longest_answer
    if not regenerate.enabled or not all(source.regenerate for source in data.sources):
        needed["data.max_tokens"] = data.max_tokens
    for names, tokens in needed.items():
        if tokens > engine.max_model_len:
            raise ValueError(
                f"{names} must not exceed engine.max_model_len {engine.max_model_len}, got {tokens}; raise "
                "it or lower the others"
            )
