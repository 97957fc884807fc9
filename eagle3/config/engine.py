"""Settings of the target and of the stages that run it: regenerate, extract and evaluate."""

from typing import Literal

from pydantic import Field

from eagle3.config.base import StageConfig, Uri

Dtype = Literal["float32", "bfloat16", "float16"]


class TargetConfig(StageConfig):
    """The model that the draft is for."""

    name: Uri = Field(description="hub id, directory with safetensors, by path or URL, or a .gguf file")
    revision: str = Field(default="", description="hub branch, tag or commit; empty: the default branch")
    public_name: str = Field(
        default="", description="name in the exported draft; required if `name` is a path; empty: the hub id"
    )
    chat_template: Uri = Field(
        default="",
        description="path or URL of a Jinja file that replaces the target's chat template; empty: the "
        "target's own",
    )


class EngineConfig(StageConfig):
    """How the target runs, in regeneration, extraction and evaluation."""

    engine: Literal["vllm", "transformers"] = Field(
        default="vllm", description="transformers is the slow reference for machines on which vLLM cannot run"
    )
    dtype: Dtype = Field(
        default="bfloat16", description="compute dtype of the target; float32 on CPUs without AVX-512 BF16"
    )
    max_model_len: int = Field(default=4096, ge=16, description="longest prompt plus answer, tokens")
    max_num_seqs: int = Field(default=128, ge=1, description="most sequences in flight")
    max_num_batched_tokens: int = Field(default=8192, ge=16, description="most tokens in an engine step")
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1, description="share of GPU memory to take")
    cpu_kv_cache_gib: int = Field(default=1, ge=1, description="key-value cache of an engine on a CPU, GiB")
    enforce_eager: bool = Field(
        default=False, description="skip graph capture and compilation: starts faster, runs slower"
    )


class SamplingConfig(StageConfig):
    """How the answers of one source are sampled; null: as for all sources."""

    temperature: float | None = Field(default=None, ge=0, description="sampling temperature; 0 is greedy")
    top_p: float | None = Field(default=None, gt=0, le=1, description="nucleus sampling mass")
    max_new_tokens: int | None = Field(default=None, ge=1, description="longest answer, tokens")


class RegenerateConfig(StageConfig):
    """regenerate: the target answers the prompts itself."""

    enabled: bool = Field(
        default=True,
        description="the target answers every turn and calls tools; false: rows keep their answers",
    )
    temperature: float = Field(default=0.7, ge=0, description="sampling temperature; 0 is greedy")
    top_p: float = Field(default=1.0, gt=0, le=1, description="nucleus sampling mass")
    max_new_tokens: int = Field(default=1024, ge=1, description="longest answer, tokens")
    sources: dict[str, SamplingConfig] = Field(
        default={}, description="sampling of single sources; the source of `prompts` is `train`"
    )
    max_tool_rounds: int = Field(
        default=8, ge=1, description="consecutive answers with tool calls after which a conversation ends"
    )
    tool_parser: str = Field(
        default="",
        description="as in `vllm serve --tool-call-parser`, such as hermes; rows with tools need one",
    )
    reasoning_parser: str = Field(
        default="", description="as in `vllm serve --reasoning-parser`, such as qwen3; empty: none"
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
        """The settings that decide the answers of a shard with these sources, for its cache key."""
        kept = {name: own for name, own in sorted(self.sources.items()) if name in names}
        return self.model_copy(update={"sources": kept})

    @property
    def longest_answer(self) -> int:
        """The largest max_new_tokens of all sources."""
        return max([self.max_new_tokens, *(own.max_new_tokens or 0 for own in self.sources.values())])


class ExtractConfig(StageConfig):
    """extract: captures the target's hidden states."""

    layer_ids: list[int] = Field(
        default=[], description="aux layers, k for the states after k of n layers; empty: 2, n//2, n-3"
    )
    encoding: Literal["bf16", "fp16", "fp32", "fp8"] = Field(
        default="bf16", description="dtype on disk; bf16 is exact for a bfloat16 engine, fp8 is e4m3"
    )
    compression: Literal["none", "zstd"] = Field(
        default="zstd", description="zstd is lossless and saves about a quarter of bf16"
    )
    chunk_bytes: int = Field(default=1 << 30, ge=1, description="uncompressed bytes after which a chunk ends")


class EvaluateConfig(StageConfig):
    """evaluate: measures acceptance and speed on held-out prompts, greedy."""

    num_speculative_tokens: int = Field(default=3, ge=1, description="draft tokens per round, k")
    max_new_tokens: int = Field(default=256, ge=2, description="longest answer, tokens")
    dtype: Dtype = Field(
        default="float32",
        description="compute dtype; with less than float32, rounding may change the text with the draft",
    )
    concurrency: int = Field(default=1, ge=1, description="sequences in flight")


class FanOutConfig(StageConfig):
    """Where the engine stages run: replicas, GPUs, servers."""

    replicas: int = Field(default=8, ge=1, description="most engine tasks at one time, each on its own GPUs")
    tensor_parallel_size: int = Field(default=1, ge=1, description="GPUs of a replica, and of the evaluation")
    server_urls: list[Uri] = Field(default=[], description="vLLM servers that answer instead of replicas")
