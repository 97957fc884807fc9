"""Settings: one frozen pydantic model per stage; a recipe is a YAML file with one block for each.

A stage's settings are part of its cache key, those of the engine included that only change its speed. In no key are places (what
lies there is, by content or commit) nor what says where and how a stage runs: FanOutConfig, DataConfig.workers, and HOW_ONLY of
TrainConfig. tests/workflows/test_cache_keys.py says of each setting which stages run again. What must hold between stages stands
in config_checks.py. Validators run on every Flyte hop: they are cheap and touch no file.
"""

from typing import Literal

from pydantic import Field, model_validator

from eagle3.stage_config import Place, StageConfig

Dtype = Literal["float32", "bfloat16", "float16"]


class TargetConfig(StageConfig):
    """Which model the draft is for."""

    name: Place = Field(description="hub id, directory with safetensors, by path or URL, or a .gguf file")
    revision: str = Field(default="", description="hub revision (branch, tag or commit); empty means the default branch")
    public_name: str = Field(
        default="", description="name written into the exported draft; needed when `name` is a path, else the hub id is used"
    )
    chat_template: Place = Field(
        default="", description="path or URL of a Jinja file that replaces the target's chat template; empty: the target's own"
    )


class EngineConfig(StageConfig):
    """How the target runs, in regeneration, extraction and evaluation alike."""

    engine: Literal["vllm", "transformers"] = Field(
        default="vllm", description="transformers is the slow reference for machines on which vLLM cannot run"
    )
    dtype: Dtype = Field(default="bfloat16", description="compute dtype of the target; float32 on CPUs without AVX-512 BF16")
    max_model_len: int = Field(default=4096, ge=16, description="longest prompt plus answer, tokens")
    max_num_seqs: int = Field(default=128, ge=1, description="sequences in flight")
    max_num_batched_tokens: int = Field(default=8192, ge=16, description="tokens per engine step")
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1, description="share of GPU memory the engine may take")
    cpu_kv_cache_gib: int = Field(default=1, ge=1, description="key-value cache of a CPU engine, GiB")
    enforce_eager: bool = Field(default=False, description="skip graph capture and compilation; starts faster, runs slower")


PresetName = Literal["", "sharegpt", "ultrachat", "magpie", "open_perfectblend", "toolace", "bfcl"]
# Their files are no data set that the hub loads.
PRESETS_WITHOUT_PLACE = ("bfcl",)


class SourceConfig(StageConfig):
    """One source of rows."""

    path: Place = Field(
        default="",
        description="hub data set as name[:subset]:split, file, directory or URL; empty: where the preset's data set lies",
    )
    revision: str = Field(default="", description="hub revision (branch, tag or commit); empty means the default branch")
    name: str = Field(
        default="", description="name in rows and report; empty: the hub name or the file's name without directories"
    )
    preset: PresetName = Field(default="", description="mapping for a well-known data set; empty: the rows' format is recognised")
    weight: float = Field(
        default=0.0, ge=0, description="share of the mix, relative to the other sources; all have one or none has"
    )
    max_rows: int = Field(default=0, ge=0, description="rows taken at most, dropped ones not counted; 0: all")
    thinking: bool | None = Field(default=None, description="thinking switched on or off in the template; null: its own default")
    regenerate: bool = Field(default=True, description="false: the rows' own answers are kept where the others are regenerated")

    @model_validator(mode="after")
    def _check_place(self) -> "SourceConfig":
        if not (self.path or self.preset):
            raise ValueError("a source needs a path or a preset, got neither; name a file, a directory, a URL or a hub data set")
        if not self.path and self.preset in PRESETS_WITHOUT_PLACE:
            raise ValueError(
                f"the preset {self.preset} has no place on the hub; give path, a file or directory with its JSONL files"
            )
        return self


class DataConfig(StageConfig):
    """prepare: rows to token shards."""

    sources: list[SourceConfig] = Field(
        default=[], description="sources besides `prompts`; without weights one after another, each in shards of its own"
    )
    excluded: list[SourceConfig] = Field(
        default=[], description="evaluation sets: conversations with one of their prompts are dropped, as with `heldout`"
    )
    max_prompt_tokens: int = Field(default=2048, ge=1, description="rows whose prompt is longer are dropped and counted")
    max_tokens: int = Field(
        default=4096, ge=2, description="rows with answers are cut to this many tokens, behind a whole turn if half of them stay"
    )
    rows_per_shard: int = Field(default=4096, ge=1, description="rows in one shard: one engine task")
    min_shards: int = Field(default=1, ge=1, description="refuse sources that fill fewer shards than this")
    max_dropped_share: float = Field(
        default=0.5, ge=0, le=1, description="share of a source's rows that may be dropped before the task fails"
    )
    seed: int = Field(default=0, description="order of sources in a weighted mix")
    workers: int = Field(
        default=0, ge=0, description="processes that tokenize; 0: one for each CPU, at most 8; no result depends on it"
    )


class SamplingConfig(StageConfig):
    """How one source's answers are sampled; what is null is as for all sources."""

    temperature: float | None = Field(default=None, ge=0, description="sampling temperature; 0 is greedy")
    top_p: float | None = Field(default=None, gt=0, le=1, description="nucleus sampling mass")
    max_new_tokens: int | None = Field(default=None, ge=1, description="longest answer, tokens")


class RegenerateConfig(StageConfig):
    """regenerate: the target's own answers."""

    enabled: bool = Field(
        default=True,
        description="the target answers every turn and calls tools itself; false: the rows' own answers are kept",
    )
    temperature: float = Field(default=0.7, ge=0, description="sampling temperature; 0 is greedy")
    top_p: float = Field(default=1.0, gt=0, le=1, description="nucleus sampling mass")
    max_new_tokens: int = Field(default=1024, ge=1, description="longest answer, tokens")
    sources: dict[str, SamplingConfig] = Field(
        default={}, description="sampling of single sources, by their names; the rows of `prompts` are the source `train`"
    )
    max_tool_rounds: int = Field(
        default=8, ge=1, description="answers with tool calls in a row, after which a conversation ends and is counted"
    )
    seed: int = Field(default=0, description="engine seed")

    def sampling(self, source: str) -> tuple[float, float, int]:
        """Temperature, top_p and longest answer in tokens of a source."""
        own = self.sources.get(source, SamplingConfig())
        return (
            self.temperature if own.temperature is None else own.temperature,
            self.top_p if own.top_p is None else own.top_p,
            self.max_new_tokens if own.max_new_tokens is None else own.max_new_tokens,
        )

    def for_sources(self, names: list[str]) -> "RegenerateConfig":
        """The same, without the sampling of other sources and whatever their order: what decides the answers of a shard is in its
        key, and no more."""
        return self.model_copy(update={"sources": {name: own for name, own in sorted(self.sources.items()) if name in names}})

    @property
    def longest_answer(self) -> int:
        """The largest max_new_tokens of all sources."""
        return max([self.max_new_tokens, *(own.max_new_tokens or 0 for own in self.sources.values())])


class VocabConfig(StageConfig):
    """vocab: the draft vocabulary."""

    size: int = Field(default=32000, ge=1, description="draft vocabulary size K, at most the target's")


class ExtractConfig(StageConfig):
    """extract: hidden states."""

    layer_ids: list[int] = Field(
        default=[], description="aux layers in vLLM's numbering (states after k layers); empty means 2, n//2, n-3"
    )
    encoding: Literal["bf16", "fp16", "fp32", "fp8"] = Field(
        default="bf16",
        description="dtype on disk; bf16 is exact for a bfloat16 engine, fp8 (e4m3) half of it",
    )
    compression: Literal["none", "zstd"] = Field(
        default="zstd", description="lossless: byte shuffle and zstd, about a quarter less for bf16"
    )
    chunk_bytes: int = Field(
        default=1 << 30, ge=1, description="size of a chunk before compression, bytes; a new one starts above it"
    )


# In no key: a larger disk budget, or another number of GPUs, trains no finished draft anew.
HOW_ONLY = ("device", "processes", "disk_budget_bytes", "checkpoint_every")
# What dtype `auto` is there, as eagle3/training/loop.py has it.
DTYPE_ON = {"cpu": "float32", "cuda": "bfloat16"}


class TrainConfig(StageConfig):
    """train: the draft."""

    ttt_steps: int = Field(default=3, ge=1, le=16, description="unroll steps (training-time test)")
    step_decay: float = Field(
        default=0.0, ge=0, le=1, description="loss weight of step i is step_decay ** i; 0 means 1.0 up to three steps, else 0.8"
    )
    loss: Literal["kl", "lk_hybrid"] = Field(
        default="kl", description="KL to the target over the draft vocabulary, or KL blended into total variation as it improves"
    )
    lk_eta: float = Field(
        default=3.0, ge=0, description="lk_hybrid: KL's share is exp(-lk_eta * expected acceptance); 0 is KL alone"
    )
    averaging: Literal["token", "conversation"] = Field(
        default="token", description="every supervised token weighs the same, or every conversation of a step does"
    )
    epochs: int = Field(default=1, ge=1, description="passes over the shards")
    pack_tokens: int = Field(default=8192, ge=2, description="tokens per pack; longer rows are cut and counted")
    packs_per_step: int = Field(default=1, ge=1, description="packs per optimizer step, shared out over the training processes")
    shuffle_chunks: int = Field(default=8, ge=1, description="chunks whose rows are shuffled together; all are held at once")
    optimizer: Literal["adamw", "muon"] = Field(default="adamw", description="muon: torch's Muon on matrices, AdamW on the rest")
    learning_rate: float = Field(default=1e-3, gt=0, description="peak learning rate of AdamW")
    muon_learning_rate: float = Field(default=2e-2, gt=0, description="peak learning rate of Muon")
    weight_decay: float = Field(default=0.0, ge=0, description="decoupled weight decay")
    beta1: float = Field(default=0.9, ge=0, lt=1, description="AdamW first-moment decay")
    beta2: float = Field(default=0.95, ge=0, lt=1, description="AdamW second-moment decay")
    warmup_share: float = Field(default=0.05, ge=0, lt=1, description="share of steps in linear warm-up")
    schedule: Literal["cosine", "linear", "constant"] = Field(default="cosine", description="after warm-up, down to zero")
    max_grad_norm: float = Field(default=1.0, gt=0, description="gradient clipping threshold, L2 norm")
    init_from: Place = Field(
        default="",
        description="draft to go on from, in the Speculators format: hub id, directory, URL or runs/<run_name>; its vocabulary "
        "and norm flags then hold; empty starts afresh",
    )
    init_revision: str = Field(default="", description="hub revision of init_from; empty means the default branch")
    head: Literal["target_trained", "target_frozen", "random"] = Field(
        default="target_trained", description="draft head: the target's rows, trained on or frozen, or random"
    )
    norm_before_residual: bool = Field(default=True, description="residual stream starts from the normed hidden state")
    norm_before_fc: bool = Field(default=False, description="one RMSNorm over the concatenated aux states")
    fc_norm: bool = Field(default=False, description="one RMSNorm per aux state")
    norm_output: bool = Field(default=False, description="feed back the normed state instead of the one before the norm")
    validation_rows: int = Field(default=32, ge=0, description="conversations held out of training, chosen by content hash")
    validate_every: int = Field(default=0, ge=0, description="optimizer steps between validations; 0: at the end of each epoch")
    keep: Literal["best", "last"] = Field(
        default="best", description="weights handed on: those of the best held-out acceptance length, or the last"
    )
    checkpoint_every: int = Field(default=200, ge=1, description="optimizer steps between checkpoints")
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="auto takes the GPU where there is one")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto", description="compute dtype, master weights are float32; auto: bfloat16 on a GPU, float32 on a CPU"
    )
    processes: int = Field(
        default=0, ge=0, description="training processes, at most packs_per_step; 0: one for each GPU, one on a CPU"
    )
    disk_budget_bytes: int = Field(
        default=200 << 30, ge=1, description="local disk for chunks streamed from a remote store, bytes, all processes together"
    )
    seed: int = Field(default=0, description="initialisation and order")

    @model_validator(mode="after")
    def _check_processes(self) -> "TrainConfig":
        if self.processes > self.packs_per_step:
            raise ValueError(
                f"train.processes must not exceed train.packs_per_step {self.packs_per_step}, got {self.processes}: "
                "each process needs a pack in every step; raise packs_per_step"
            )
        return self

    def settings_of_result(self) -> "TrainConfig":
        """What decides the draft: the same, its defaults for how training runs and for where the initial draft lies.

        What that draft holds goes into keys by its digest. A device that decides the compute dtype stands there as that dtype.
        """
        how = {name: type(self).model_fields[name].default for name in HOW_ONLY}
        dtype = DTYPE_ON.get(self.device, "auto") if self.dtype == "auto" else self.dtype
        return self.model_copy(update=how | {"dtype": dtype, "init_from": "", "init_revision": ""})

    @property
    def step_weights(self) -> list[float]:
        """Loss weight of each TTT step."""
        decay = self.step_decay or (1.0 if self.ttt_steps <= 3 else 0.8)
        return [decay**step for step in range(self.ttt_steps)]


class ExportConfig(StageConfig):
    """export: the vLLM directory."""

    num_speculative_tokens: int = Field(default=3, ge=1, description="draft tokens per round written as the default")
    dtype: Dtype = Field(default="bfloat16", description="dtype of the stored weights; float32 serves exactly what was trained")


class EvaluateConfig(StageConfig):
    """evaluate: acceptance and speed on held-out prompts, greedy."""

    num_speculative_tokens: int = Field(default=3, ge=1, description="draft tokens per round, k")
    max_new_tokens: int = Field(default=256, ge=2, description="longest answer, tokens")
    dtype: Dtype = Field(
        default="float32",
        description="compute dtype; in float32 text with and without the draft is the same, below it rounding may differ",
    )
    concurrency: int = Field(default=1, ge=1, description="sequences in flight while speed is measured")


class FanOutConfig(StageConfig):
    """Where the engine stages run: replicas, GPUs, servers. In no cache key."""

    replicas: int = Field(default=8, ge=1, description="engine tasks in flight, each on its own GPUs")
    tensor_parallel_size: int = Field(
        default=1, ge=1, description="GPUs of one replica, over which the target is split; of the evaluation too"
    )
    server_urls: list[Place] = Field(
        default=[], description="running vLLM servers that answer and capture instead of replicas, shards dealt out in turn"
    )
    min_success_ratio: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="share of shards that must be captured; below 1 training goes on without those that failed for good",
    )


class PromoteConfig(StageConfig):
    """promote: the draft that is served, and when another takes its place."""

    place: Place = Field(
        min_length=1, description="directory or URL that keeps promoted.json and the promoted drafts; remote: a URL"
    )
    margin: float = Field(
        default=0.02, ge=0, description="acceptance length, in tokens, by which a new draft may be worse and still be promoted"
    )
    identical_text: bool = Field(
        default=True, description="refuse a draft with which greedy text on any held-out prompt is another than without it"
    )
    warm_start: bool = Field(
        default=True, description="train from the promoted draft, where there is one; false: as train.init_from says"
    )
    warm_rate_share: float = Field(
        default=1.0, gt=0, le=1, description="share of train's learning rates with which training goes on from the promoted draft"
    )
