"""Settings of the draft: train, export and promote."""

from typing import Literal

from pydantic import Field, model_validator

from eagle3.config.base import StageConfig, Uri
from eagle3.config.engine import Dtype

# Settings that no cache key holds: a finished draft is not trained again for a new disk budget or other GPUs.
HOW_ONLY = ("device", "processes", "disk_budget_bytes", "checkpoint_every")

# Meaning of dtype `auto` on a device, here and in eagle3/training/loop.py.
DTYPE_ON = {"cpu": "float32", "cuda": "bfloat16"}


class TrainConfig(StageConfig):
    """train: trains the draft."""

    ttt_steps: int = Field(default=3, ge=1, le=16, description="unroll steps (training-time test)")
    step_decay: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="loss weight of step i is step_decay ** i; 0: 1.0 or, above 3 steps, 0.8",
    )
    loss: Literal["kl", "lk_hybrid"] = Field(
        default="kl",
        description="kl: KL to the target; lk_hybrid: from KL to total variation as the draft improves",
    )
    lk_eta: float = Field(default=3.0, ge=0, description="share of KL: exp(-lk_eta * expected acceptance)")
    averaging: Literal["token", "conversation"] = Field(
        default="token",
        description="what has equal weight in a step: each supervised token or each conversation",
    )
    epochs: int = Field(default=1, ge=1, description="passes over the shards")
    pack_tokens: int = Field(default=8192, ge=2, description="tokens in a pack; longer rows are cut")
    packs_per_step: int = Field(default=1, ge=1, description="packs in an optimizer step of all processes")
    shuffle_chunks: int = Field(
        default=8, ge=1, description="chunks whose rows are shuffled together; twice as many are on disk"
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
        description="draft to continue from (Speculators format): hub id, directory, URL or "
        "`runs/<run_name>`; its vocabulary and norm flags replace the settings; empty: a new draft",
    )
    init_revision: str = Field(default="", description="hub revision of init_from; empty: the default branch")
    head: Literal["target_trained", "target_frozen", "random"] = Field(
        default="target_trained", description="draft head: the target's rows, trained or frozen, or random"
    )
    norm_before_residual: bool = Field(default=True, description="the residual stream starts normed")
    norm_before_fc: bool = Field(default=False, description="one RMSNorm over the concatenated aux states")
    fc_norm: bool = Field(default=False, description="one RMSNorm per aux state")
    norm_output: bool = Field(default=False, description="feed the normed state into the next TTT step")
    validation_rows: int = Field(default=32, ge=0, description="conversations kept for validation")
    validate_every: int = Field(default=0, ge=0, description="steps between validations; 0: after each epoch")
    keep: Literal["best", "last"] = Field(
        default="best", description="weights to export: of the best validation acceptance length, or the last"
    )
    checkpoint_every: int = Field(default=200, ge=1, description="optimizer steps between checkpoints")
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="auto: a GPU if there is one")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto",
        description="compute dtype next to float32 master weights; auto: bfloat16 on a GPU, else float32",
    )
    processes: int = Field(default=0, ge=0, description="at most packs_per_step; 0: one per GPU, one on CPU")
    disk_budget_bytes: int = Field(
        default=200 << 30, ge=1, description="local disk for remote chunks, bytes, all processes together"
    )
    seed: int = Field(default=0, description="seed of initial weights and order")

    @model_validator(mode="after")
    def _check_processes(self) -> "TrainConfig":
        if self.processes > self.packs_per_step:
            raise ValueError(
                f"train.processes must not exceed train.packs_per_step {self.packs_per_step}, got "
                f"{self.processes}: each process needs a pack in every step; raise packs_per_step"
            )
        return self

    def settings_of_result(self) -> "TrainConfig":
        """The settings that decide the draft, for its cache key; the others get their defaults.

        The key also has the initial draft's digest. A device that decides the dtype is in it as that dtype.
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
    """export: writes the directory that vLLM loads."""

    num_speculative_tokens: int = Field(
        default=3, ge=1, description="default number of draft tokens per round, as written into the export"
    )
    dtype: Dtype = Field(default="bfloat16", description="dtype of the weights; float32: exactly as trained")


class PromoteConfig(StageConfig):
    """promote: the draft that is served, and when a new one replaces it."""

    place: Uri = Field(
        min_length=1, description="directory or URL of promoted.json and its drafts; a URL in remote runs"
    )
    margin: float = Field(
        default=0.02, ge=0, description="tokens of acceptance length that a new draft may lose"
    )
    identical_text: bool = Field(default=True, description="refuse a draft that changes any held-out answer")
    warm_start: bool = Field(
        default=True,
        description="start from the promoted draft, if there is one; false: from train.init_from",
    )
    warm_rate_share: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="factor on the learning rates for a start from the promoted draft",
    )
