"""The target by transformers: the slow reference for machines on which vLLM cannot run, and what vLLM is checked against."""

import time
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig

from eagle3.engine.capture import Add
from eagle3.engine.progress import Report
from eagle3.regenerate.answers import Answer, Follow, Request, Sampling
from eagle3.shards.tokens import TokenRow
from eagle3.targets.properties import end_of_turn_ids

# Padding is computed here, unlike in vLLM: batches are small and hold rows of similar length.
BATCH_TOKENS = 4096


class ReferenceEngine:
    """The same two jobs as VllmEngine, with the whole model in this process."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.target_dir: str = settings["target_dir"]
        self.draft_dir: str | None = settings["draft_dir"]
        self.num_speculative_tokens: int = settings["num_speculative_tokens"]
        self.dtype: str = settings["engine"]["dtype"]
        self.max_num_seqs: int = settings["engine"]["max_num_seqs"]
        # The reference drafter is plain CPU code.
        self.device = "cuda" if torch.cuda.is_available() and self.draft_dir is None else "cpu"
        model = AutoModelForCausalLM.from_pretrained(
            self.target_dir, dtype=getattr(torch, self.dtype), local_files_only=True
        )
        self.model = model.to(self.device).eval()
        self.model.generation_config = GenerationConfig()  # its sampling defaults would mix into every call

    def describe(self) -> dict[str, Any]:
        """Every setting that can change a state, for the manifest."""
        return {
            "engine": "transformers",
            "engine_version": f"transformers {version('transformers')}",
            "torch_version": torch.__version__,
            "device": self.device,
            "dtype": self.dtype,
            "last_layer_id": self.model.config.num_hidden_layers,
        }

    @torch.no_grad()
    def capture(self, rows: list[TokenRow], layer_ids: list[int], add: Add) -> int:
        """Hand every row's states to `add`, in batches of similar length; returns 0, nothing comes from a cache."""
        lengths = [len(r.token_ids) for r in rows]
        for batch in self._batches_in_order(lengths):
            states, last = self._states([rows[i].token_ids for i in batch], layer_ids)
            for j, i in enumerate(batch):
                row_states, n = states[j, : lengths[i]], lengths[i]
                add(i, row_states.cpu(), int(self.model.lm_head(last[j, n - 1]).argmax()))
        return 0

    def _batches_in_order(self, lengths: list[int]) -> Iterator[list[int]]:
        """Batches of similar length, each from a few neighbours: chunks of a shard are to be finished one after the other."""
        window = 4 * self.max_num_seqs
        for first in range(0, len(lengths), window):
            for batch in batches(lengths[first : first + window], self.max_num_seqs):
                yield [first + i for i in batch]

    def _states(self, token_ids: list[list[int]], layer_ids: list[int]) -> tuple[Tensor, Tensor]:
        """[B, T, A + 1, H] states, the last before the final norm, and [B, T, H] after it.

        transformers' hidden_states[N] is after the norm: the state before it is what goes into the norm.
        """
        kept: list[Tensor] = []
        norm = self.model.base_model.norm
        hook = norm.register_forward_pre_hook(lambda module, args: kept.append(args[0]))
        ids, mask = _padded(token_ids, self.device, left=False)
        try:
            output = self.model.base_model(
                ids, attention_mask=mask, output_hidden_states=True, use_cache=False
            )
        finally:
            hook.remove()
        depth = self.model.config.num_hidden_layers
        wanted = [kept[-1] if k == depth else output.hidden_states[k] for k in [*layer_ids, depth]]
        return torch.stack(wanted, dim=2), output.last_hidden_state

    def generate(
        self, prompts: list[list[int]], sampling: Sampling, seed: int, report: Report
    ) -> dict[str, Any]:
        """Answer every prompt; a Generation as a dict."""
        stop_ids = self._stop_ids(sampling)
        torch.manual_seed(seed)
        start = time.perf_counter()
        rounds = 0
        accepted: list[int] = []
        if self.draft_dir is not None:
            answers, rounds, accepted = self._speculate(prompts, sampling, report)
        else:
            found: dict[int, list[int]] = {}
            for i, ids in self._sample(prompts, sampling):
                found[i] = ids
                report.add(len(ids), 1)
                report.tell()
            answers = [found[i] for i in range(len(prompts))]
        return {
            "answers": [
                {"token_ids": a, "finish_reason": "stop" if a[-1] in stop_ids else "length"} for a in answers
            ],
            "seconds": time.perf_counter() - start,
            "generated_tokens": sum(map(len, answers)),
            "num_drafts": rounds,
            "num_accepted_tokens": sum(accepted),
            "accepted_per_position": accepted,
        }

    def play(self, requests: dict[int, Request], follow: Follow, seed: int, report: Report) -> None:
        """Answer every conversation's request, and what follows on the answer, round by round until nothing does."""
        torch.manual_seed(seed)
        while requests:
            following: dict[int, Request | None] = {}
            for sampling in sorted({r.sampling for r in requests.values()}, key=str):
                alike = [i for i, r in requests.items() if r.sampling == sampling]
                prompts = [requests[i].prompt for i in alike]
                stop_ids = self._stop_ids(sampling)
                for n, ids in self._sample(prompts, sampling):
                    request = follow(alike[n], Answer(ids, "stop" if ids[-1] in stop_ids else "length"))
                    following[alike[n]] = request
                    report.add(len(ids), request is None)
                    report.tell()
            requests = {i: request for i, request in following.items() if request}

    def _stop_ids(self, sampling: Sampling) -> list[int]:
        return [] if sampling.ignore_eos else end_of_turn_ids(self.target_dir)

    def _sample(self, prompts: list[list[int]], sampling: Sampling) -> Iterator[tuple[int, list[int]]]:
        """(number of the prompt, answer), batch by batch."""
        stop_ids = self._stop_ids(sampling)
        longest = sampling.max_new_tokens
        config = GenerationConfig(
            max_new_tokens=longest, eos_token_id=stop_ids or None, pad_token_id=0, **_how(sampling)
        )
        lengths = [len(p) + longest for p in prompts]
        for batch in batches(lengths, self.max_num_seqs):
            ids, mask = _padded([prompts[i] for i in batch], self.device, left=True)
            output = self.model.generate(ids, attention_mask=mask, generation_config=config)
            for i, answer in zip(batch, output[:, ids.shape[1] :].tolist(), strict=True):
                end = next((n + 1 for n, token in enumerate(answer) if token in stop_ids), len(answer))
                yield i, answer[:end]

    def _speculate(
        self, prompts: list[list[int]], sampling: Sampling, report: Report
    ) -> tuple[list[list[int]], int, list[int]]:
        from eagle3.draft.decode import ReferenceDraft, speculative_generate

        if sampling.temperature > 0:
            raise ValueError(
                f"the reference engine speculates only at temperature 0, got {sampling.temperature}; use engine: vllm"
            )
        assert self.draft_dir is not None
        draft = ReferenceDraft.load(
            self.draft_dir, self.model.get_input_embeddings().weight, self.model.dtype
        )
        k, stop_ids = self.num_speculative_tokens, self._stop_ids(sampling)
        answers, rounds, accepted = [], 0, [0] * k
        for prompt in prompts:
            answer, more_rounds, more = speculative_generate(
                self.model, draft, prompt, sampling.max_new_tokens, k, stop_ids
            )
            answers.append(answer)
            report.add(len(answer), 1)
            report.tell()
            rounds += more_rounds
            accepted = [a + b for a, b in zip(accepted, more, strict=True)]
        return answers, rounds, accepted


def _how(sampling: Sampling) -> dict[str, Any]:
    """What transformers calls it; greedy is its default."""
    if sampling.temperature > 0:
        return {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0}
    return {}


def batches(lengths: list[int], max_rows: int) -> list[list[int]]:
    """Group indices, longest first, so that each group's padded size stays within BATCH_TOKENS (one row always fits)."""
    groups: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if (
            groups
            and (len(groups[-1]) + 1) * lengths[groups[-1][0]] <= BATCH_TOKENS
            and len(groups[-1]) < max_rows
        ):
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def _padded(token_ids: list[list[int]], device: str, left: bool) -> tuple[Tensor, Tensor]:
    """[B, T] int64 ids and attention mask (1 where real)."""
    width = max(map(len, token_ids))
    ids, mask = (
        torch.zeros(len(token_ids), width, dtype=torch.int64),
        torch.zeros(len(token_ids), width, dtype=torch.int64),
    )
    for row, tokens in enumerate(token_ids):
        place = slice(width - len(tokens), width) if left else slice(0, len(tokens))
        ids[row, place], mask[row, place] = torch.tensor(tokens), 1
    return ids.to(device), mask.to(device)
