"""Refuse a run that a later stage would refuse: the first node of `plan` and of every run.

Preflight reads the settings, the target's files without weights, the initial draft's config.json and the
first rows of the sources. It takes seconds and no GPU. Later stages check what it does not read: prepare the
other rows, fetch_target the target's tensors, build_vocab the initial draft's tensors.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from tempfile import TemporaryDirectory
from typing import Any

from eagle3.config.checks import check_lengths, check_processes, check_sampled_sources
from eagle3.config.data import SourceConfig
from eagle3.config.run import RunSettings
from eagle3.data.prepare import check_sources
from eagle3.data.sources import pin_sources, source_version
from eagle3.draft.initial import check_settings, read_settings, resolve_initial
from eagle3.export import check_public_name
from eagle3.planning.accelerators import ACCELERATORS
from eagle3.planning.estimates import draft_size
from eagle3.planning.survey import survey
from eagle3.planning.workload import SourceSurvey, Workload, workload
from eagle3.regenerate.parsers import check_parsers
from eagle3.shards.hidden_states import hidden_state_bytes
from eagle3.targets.properties import aux_layer_ids, check_max_model_len
from eagle3.targets.resolve import fetch_tokenizer, identify_target
from eagle3.targets.size import TargetSize, check_gpu_memory, check_tensor_parallel, target_size
from eagle3.targets.trust import sanitize
from eagle3.targets.weights import check_target_config, read_config

# float32 master weights, their gradient and two moments of the optimizer.
TRAINED_BYTES = 16
# Flyte 1.16 refuses events above 4 MiB; extraction's take 1.7 kB a shard: 2467 fit.
MAX_SHARDS = 2400
RAISE_TENSOR_PARALLEL = "raise fanout.tensor_parallel_size or name a larger resources.engine.accelerator"


@dataclass(frozen=True)
class Preflight:
    """The artefacts that the names in a recipe refer to now, and a survey of the sources.

    target: name, revision and digest from `identify_target`. config: the target's config.json. init_from and
    init_digest are empty without an initial draft. source_versions: of data.sources, then of data.excluded.
    surveys: of the prompts, if there are any, then of data.sources.
    """

    target: tuple[str, str, str]
    config: dict[str, Any]
    public_name: str
    init_from: str
    init_digest: str
    source_versions: list[str] = field(default_factory=list)
    surveys: list[SourceSurvey] = field(default_factory=list)
    num_heldout: int = 0


def preflight(
    cfg: RunSettings, disks: dict[str, int], prompts: str, heldout: str, with_rows: bool
) -> Preflight:
    """Resolve the names in a recipe and check everything that can be checked before work starts.

    Args:
        disks: block of `resources` -> local disk of its pods, bytes.
        prompts: file with prompts, or empty.
        with_rows: False for a run that starts from shards: its prompts and sources are not read.

    Raises:
        ValueError: if a setting, the target or a source is wrong; permanent.
        ConnectionError: if the network failed; transient.
    """
    check_lengths(cfg.data, cfg.engine, cfg.regenerate, cfg.evaluate)
    check_processes(cfg.train, cfg.resources)
    check_parsers(cfg.regenerate, has_tools=False)
    from_prompts = [SourceConfig(path=prompts, name="train")] if prompts else []
    if with_rows:
        _check_names(cfg, from_prompts)
    public_name = cfg.target.public_name or cfg.target.name
    check_public_name(public_name)
    target = identify_target(cfg.target)
    name, revision, _ = target
    init_from = ""
    init_digest = ""
    if cfg.train.init_from:
        init_from, init_digest = resolve_initial(cfg.train.init_from, cfg.train.init_revision)
    with TemporaryDirectory() as target_dir:
        fetch_tokenizer(cfg.target.model_copy(update={"revision": revision}), target_dir)
        sanitize(target_dir)
        config = read_config(target_dir, name)
        check_target(cfg, config, name, disks, is_vocab_given=bool(init_digest))
        if init_digest:
            layer_ids = aux_layer_ids(cfg.extract.layer_ids, config["num_hidden_layers"])
            check_settings(read_settings(init_from, init_digest, config), config, layer_ids)
        found = Preflight(target, config, public_name, init_from, init_digest)
        return _survey_rows(found, cfg, from_prompts, heldout, target_dir) if with_rows else found


def _check_names(cfg: RunSettings, from_prompts: list[SourceConfig]) -> None:
    """Refuse a run without sources, and sources with conflicting names or weights."""
    sources = [*from_prompts, *cfg.data.sources]
    if not sources:
        raise ValueError("there is nothing to train on: give prompts, data.sources or both")
    # A recipe without prompts may keep sampling settings for their source, "train".
    check_sampled_sources(cfg.regenerate, list(dict.fromkeys(["train", *check_sources(sources)])))


def _survey_rows(
    found: Preflight, cfg: RunSettings, from_prompts: list[SourceConfig], heldout: str, target_dir: str
) -> Preflight:
    """Survey the sources and check the survey."""
    versions = [source_version(source) for source in (*cfg.data.sources, *cfg.data.excluded)]
    sources = from_prompts + pin_sources(cfg.data.sources, versions[: len(cfg.data.sources)])
    held_out = SourceConfig(path=heldout, name="heldout")
    surveys, num_heldout = survey(sources, held_out, target_dir, cfg.data, cfg.regenerate.enabled)
    check_rows(cfg, found.config, surveys)
    return replace(found, source_versions=versions, surveys=surveys, num_heldout=num_heldout)


def check_target(
    cfg: RunSettings, config: dict[str, Any], name: str, disks: dict[str, int], is_vocab_given: bool = False
) -> None:
    """Refuse settings that do not fit this target, and a target that does not fit the pods.

    Args:
        config: the target's config.json.
        name: the target's name, for messages.
        disks: block of `resources` -> local disk of its pods, bytes.
        is_vocab_given: True if the initial draft sets the draft vocabulary, so that vocab.size is ignored.
    """
    check_target_config(config, name)
    check_max_model_len(cfg.engine.max_model_len, config)
    aux_layer_ids(cfg.extract.layer_ids, config["num_hidden_layers"])
    if not is_vocab_given and cfg.vocab.size > config["vocab_size"]:
        raise ValueError(
            f"draft vocab must not exceed the target's {config['vocab_size']}, got {cfg.vocab.size}; lower "
            "vocab.size in the recipe"
        )
    size = target_size(config)
    _check_engine_gpus(cfg, size)
    _check_trainer_gpu(cfg, config, size)
    _check_disks(cfg, size, disks)


def _check_engine_gpus(cfg: RunSettings, size: TargetSize) -> None:
    gpu = ACCELERATORS[cfg.resources.engine.accelerator]
    usable_bytes = gpu.memory_gb * 1e9 * cfg.engine.gpu_memory_utilization
    num_gpus = cfg.fanout.tensor_parallel_size
    longest = cfg.engine.max_model_len
    check_tensor_parallel(size, num_gpus)
    check_gpu_memory(size, cfg.engine.dtype, longest, num_gpus, usable_bytes, RAISE_TENSOR_PARALLEL)
    remedy = f"for the evaluation: set evaluate.dtype to bfloat16, {RAISE_TENSOR_PARALLEL}"
    check_gpu_memory(size, cfg.evaluate.dtype, longest, num_gpus, usable_bytes, remedy)


def _check_trainer_gpu(cfg: RunSettings, config: dict[str, Any], size: TargetSize) -> None:
    accelerator = cfg.resources.trainer.accelerator
    memory = ACCELERATORS[accelerator].memory_gb * 1e9
    # The trainer holds the target's embedding and head in the compute dtype: two bytes a parameter.
    frozen = 2 * 2 * size.vocab_size * size.hidden_size
    needed = draft_size(config, cfg).params * TRAINED_BYTES + frozen
    if needed > memory:
        raise ValueError(
            f"the draft, the optimizer and the target's embedding and head must fit on one {accelerator} of "
            f"{memory / 1e9:.0f} GB, they take {needed / 1e9:.0f} GB; lower vocab.size or name a larger "
            "resources.trainer.accelerator"
        )


def _check_disks(cfg: RunSettings, size: TargetSize, disks: dict[str, int]) -> None:
    # Most checkpoints are bfloat16; quantised ones are smaller.
    weights = size.weight_bytes("bfloat16")
    needed = {
        "data": weights,
        "engine": weights + 2 * cfg.extract.chunk_bytes,
        "trainer": weights + cfg.train.disk_budget_bytes,
    }
    for pod, needed_bytes in needed.items():
        if needed_bytes > disks[pod]:
            remedy = "raise it or lower train.disk_budget_bytes" if pod == "trainer" else "raise it"
            raise ValueError(
                f"resources.{pod}.ephemeral_storage must hold {needed_bytes / 1e9:.0f} GB, the target's "
                f"files included, it is {disks[pod] / 1e9:.0f} GB; {remedy}"
            )


def check_rows(cfg: RunSettings, config: dict[str, Any], surveys: Sequence[SourceSurvey]) -> None:
    """Refuse too few rows, too many shards, tools without parser, chunk groups above the disk budget."""
    check_parsers(cfg.regenerate, has_tools=any(s.tool_tasks for s in surveys))
    work = workload(cfg, surveys)
    if work.shards > MAX_SHARDS:
        raise ValueError(
            f"a run must have at most {MAX_SHARDS} shards, Flyte sends the nodes of a fan-out in one message "
            f"of 4 MiB; {work.rows} rows fill {work.shards} of data.rows_per_shard = "
            f"{cfg.data.rows_per_shard}; raise data.rows_per_shard"
        )
    is_exact = all(s.basis == "counted" for s in surveys) and not any(s.weight for s in cfg.data.sources)
    if is_exact and work.shards < cfg.data.min_shards:
        raise ValueError(
            f"{work.rows} usable rows fill {work.shards} shards of data.rows_per_shard = "
            f"{cfg.data.rows_per_shard}, data.min_shards = {cfg.data.min_shards} are required; add rows or "
            "lower one of them"
        )
    # A trainer process trains on one group of chunks while it fetches the next.
    groups_bytes = 2 * cfg.train.shuffle_chunks * cfg.extract.chunk_bytes
    held_bytes = min(groups_bytes, largest_state_bytes(cfg, config, work))
    budget_bytes = cfg.train.disk_budget_bytes // (cfg.train.processes or cfg.resources.trainer.gpus)
    if held_bytes > budget_bytes:
        raise ValueError(
            f"two groups of chunks take up to {held_bytes} bytes, the disk budget of a process is "
            f"{budget_bytes}; lower train.shuffle_chunks or raise train.disk_budget_bytes"
        )


def largest_state_bytes(cfg: RunSettings, config: dict[str, Any], work: Workload) -> int:
    """Bytes of all hidden states before compression, every answer at its longest."""
    layers = len(aux_layer_ids(cfg.extract.layer_ids, config["num_hidden_layers"]))
    return hidden_state_bytes(
        work.max_tokens, work.max_supervised, layers, config["hidden_size"], cfg.extract.encoding
    )
