"""Settings of the draft: train, export and promote."""

from typing import Literal

from pydantic import Field, model_validator

from eagle3.config.base import StageConfig, Uri
from eagle3.config.engine import Dtype

# In no key: a larger disk budget, or another number of GPUs, trains no finished draft anew.
HOW_ONLY = ("device", "processes", "disk_budget_bytes", "checkpoint_every")


# What dtype `auto` is there, as eagle3/training/loop.py has it.
DTYPE_ON = {"cpu": "float32", "cuda": "bfloat16"}


class TrainConfig(StageConfig):
    """train: the draft."""

    ttt_steps: int = Field(default=3, ge=1, le=16, description="unroll steps (training-time test)")
    step_decay: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="loss weight of step i is step_decay ** i; 0 means 1.0 up to three steps, else 0.8",
    )
    loss: Literal["kl", "lk_hybrid"] = Field(
        default="kl",
        description="KL to the target over the draft vocabulary, or KL blended into total variation as it improves",
    )
    lk_eta: float = Field(
        default=3.0,
        ge=0,
        description="lk_hybrid: KL's share is exp(-lk_eta * expected acceptance); 0 is KL alone",
    )
    averaging: Literal["token", "conversation"] = Field(
        default="token",
        description="every supervised token weighs the same, or every conversation of a step does",
    )
    epochs: int = Field(default=1, ge=1, description="passes over the shards")
    pack_tokens: int = Field(
        default=8192, ge=2, description="tokens per pack; longer rows are cut and counted"
    )
    packs_per_step: int = Field(
        default=1, ge=1, description="packs per optimizer step, shared out over the training processes"
    )
    shuffle_chunks: int = Field(
        default=8, ge=1, description="chunks whose rows are shuffled together; all are held at once"
    )
    optimizer: Literal["adamw", "muon"] = Field(
        default="adamw", description="muon: torch's Muon on matrices, AdamW on the rest"
    )
    learning_rate: float = Field(default=1e-3, gt=0, description="peak learning rate of AdamW")
    muon_learning_rate: float = Field(default=2e-2, gt=0, description="peak learning rate of Muon")
    weight_decay: float = Field(default=0.0, ge=0, description="decoupled weight decay")
    beta1: float = Field(default=0.9, ge=0, lt=1, description="AdamW first-moment decay")
    beta2: float = Field(default=0.95, ge=0, lt=1, description="AdamW second-moment decay")
    warmup_share: float = Field(default=0.05, ge=0, lt=1, description="share of steps in linear warm-up")
    schedule: Literal["cosine", "linear", "constant"] = Field(
        default="cosine", description="after warm-up, down to zero"
    )
    max_grad_norm: float = Field(default=1.0, gt=0, description="gradient clipping threshold, L2 norm")
    init_from: Uri = Field(
        default="",
        description="draft to go on from, in the Speculators format: hub id, directory, URL or runs/<run_name>; its vocabulary "
        "and norm flags then hold; empty starts afresh",
    )
    init_revision: str = Field(
        default="", description="hub revision of init_from; empty means the default branch"
    )
    head: Literal["target_trained", "target_frozen", "random"] = Field(
        default="target_trained", description="draft head: the target's rows, trained on or frozen, or random"
    )
    norm_before_residual: bool = Field(
        default=True, description="residual stream starts from the normed hidden state"
    )
    norm_before_fc: bool = Field(default=False, description="one RMSNorm over the concatenated aux states")
    fc_norm: bool = Field(default=False, description="one RMSNorm per aux state")
    norm_output: bool = Field(
        default=False, description="feed back the normed state instead of the one before the norm"
    )
    validation_rows: int = Field(
        default=32, ge=0, description="conversations held out of training, chosen by content hash"
    )
    validate_every: int = Field(
        default=0, ge=0, description="optimizer steps between validations; 0: at the end of each epoch"
    )
    keep: Literal["best", "last"] = Field(
        default="best",
        description="weights handed on: those of the best held-out acceptance length, or the last",
    )
    checkpoint_every: int = Field(default=200, ge=1, description="optimizer steps between checkpoints")
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="auto takes the GPU where there is one"
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto",
        description="compute dtype, master weights are float32; auto: bfloat16 on a GPU, float32 on a CPU",
    )
    processes: int = Field(
        default=0,
        ge=0,
        description="training processes, at most packs_per_step; 0: one for each GPU, one on a CPU",
    )
    disk_budget_bytes: int = Field(
        default=200 << 30,
        ge=1,
        description="local disk for chunks streamed from a remote store, bytes, all processes together",
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

    num_speculative_tokens: int = Field(
        default=3, ge=1, description="draft tokens per round written as the default"
    )
    dtype: Dtype = Field(
        default="bfloat16", description="dtype of the stored weights; float32 serves exactly what was trained"
    )


class PromoteConfig(StageConfig):
    """promote: the draft that is served, and when another takes its place."""

    place: Uri = Field(
        min_length=1,
        description="directory or URL that keeps promoted.json and the promoted drafts; remote: a URL",
    )
    margin: float = Field(
        default=0.02,
        ge=0,
        description="acceptance length, in tokens, by which a new draft may be worse and still be promoted",
    )
    identical_text: bool = Field(
        default=True,
        description="refuse a draft with which greedy text on any held-out prompt is another than without it",
    )
    warm_start: bool = Field(
        default=True,
        description="train from the promoted draft, where there is one; false: as train.init_from says",
    )
    warm_rate_share: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="share of train's learning rates with which training goes on from the promoted draft",
    )
