"""The target in transformers: a slow reference for tests of vLLM and for machines without it."""

from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig

from eagle3.engine.interface import AddRow, EngineSettings
from eagle3.engine.progress import Report
from eagle3.regenerate.answers import Answer, Follow, Request, Sampling
from eagle3.shards.tokens import TokenRow
from eagle3.targets.properties import end_of_turn_ids

# Unlike vLLM, transformers computes padding: batches are small and hold rows of similar length.
BATCH_TOKENS = 4096


class ReferenceEngine:
    """Does what VllmEngine does, with the whole model in this process."""

    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings
        self.max_num_seqs = settings.engine.max_num_seqs
        self.end_ids = end_of_turn_ids(settings.target_dir)
        # The reference drafter is plain CPU code.
        self.device = "cuda" if torch.cuda.is_available() and settings.speculation is None else "cpu"
        model = AutoModelForCausalLM.from_pretrained(
            settings.target_dir, dtype=getattr(torch, settings.engine.dtype), local_files_only=True
        )
        self.model = model.to(self.device).eval()
        self.model.generation_config = GenerationConfig()  # else its sampling defaults apply to every call
        self.num_drafts = 0
        self.accepted = [0] * (settings.speculation.num_tokens if settings.speculation else 0)

    def describe(self) -> dict[str, Any]:
        return {
            "engine": "transformers",
            "engine_version": f"transformers {version('transformers')}",
            "torch_version": torch.__version__,
            "device": self.device,
            "dtype": self.settings.engine.dtype,
            "last_layer_id": self.model.config.num_hidden_layers,
        }

    @torch.no_grad()
    def capture(self, rows: list[TokenRow], add_row: AddRow) -> int:
        """Call `add_row` for every row; returns 0 because no prefix cache exists."""
        lengths = [len(r.token_ids) for r in rows]
        for batch in self._batches_in_order(lengths):
            states, last = self._states([rows[i].token_ids for i in batch])
            for j, i in enumerate(batch):
                next_token = int(self.model.lm_head(last[j, lengths[i] - 1]).argmax())
                add_row(i, states[j, : lengths[i]].cpu(), next_token)
        return 0

    def _batches_in_order(self, lengths: list[int]) -> Iterator[list[int]]:
        """Batch rows of similar length within a window of rows, so that chunks finish in order."""
        window = 4 * self.max_num_seqs
        for first in range(0, len(lengths), window):
            for batch in batches(lengths[first : first + window], self.max_num_seqs):
                yield [first + i for i in batch]

    def _states(self, token_ids: list[list[int]]) -> tuple[Tensor, Tensor]:
        """Return states [B, T, A + 1, H], the last one before the final norm, and [B, T, H] after the norm.

        transformers' hidden_states[N] is after the norm, so a hook keeps the norm's input.
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
        assert self.settings.layer_ids is not None
        depth = self.model.config.num_hidden_layers
        layers = [*self.settings.layer_ids, depth]
        wanted = [kept[-1] if k == depth else output.hidden_states[k] for k in layers]
        return torch.stack(wanted, dim=2), output.last_hidden_state

    def warm_up(self, requests: list[Request]) -> None:
        """Nothing to do."""

    def draft_counts(self) -> tuple[int, tuple[int, ...]]:
        return self.num_drafts, tuple(self.accepted)

    def answer(self, requests: dict[int, Request], follow: Follow, seed: int, report: Report) -> None:
        """Answer round by round: all requests of one turn, then those of the next."""
        torch.manual_seed(seed)
        while requests:
            following: dict[int, Request | None] = {}
            for sampling in sorted({r.sampling for r in requests.values()}, key=str):
                numbers = [i for i, r in requests.items() if r.sampling == sampling]
                for n, answer in self._answers([requests[i].prompt for i in numbers], sampling):
                    request = follow(numbers[n], answer)
                    following[numbers[n]] = request
                    report.add(len(answer.token_ids), request is None)
                    report.send_if_due()
            requests = {i: request for i, request in following.items() if request}

    def _answers(self, prompts: list[list[int]], sampling: Sampling) -> Iterator[tuple[int, Answer]]:
        """Yield (index of the prompt, answer), each when it finishes."""
        end_ids = [] if sampling.ignore_eos else self.end_ids
        written = self._speculate if self.settings.speculation else self._sample
        for i, token_ids in written(prompts, sampling, end_ids):
            yield i, Answer(token_ids, "stop" if token_ids[-1] in end_ids else "length")

    def _sample(
        self, prompts: list[list[int]], sampling: Sampling, end_ids: list[int]
    ) -> Iterator[tuple[int, list[int]]]:
        longest = sampling.max_new_tokens
        sampling_arguments: dict[str, Any] = {}  # greedy
        if sampling.temperature > 0:
            sampling_arguments = {
                "do_sample": True,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": 0,
            }
        config = GenerationConfig(
            max_new_tokens=longest, eos_token_id=end_ids or None, pad_token_id=0, **sampling_arguments
        )
        for batch in batches([len(p) + longest for p in prompts], self.max_num_seqs):
            ids, mask = _padded([prompts[i] for i in batch], self.device, left=True)
            output = self.model.generate(ids, attention_mask=mask, generation_config=config)
            for i, written in zip(batch, output[:, ids.shape[1] :].tolist(), strict=True):
                end = next((n + 1 for n, token in enumerate(written) if token in end_ids), len(written))
                yield i, written[:end]

    def _speculate(
        self, prompts: list[list[int]], sampling: Sampling, end_ids: list[int]
    ) -> Iterator[tuple[int, list[int]]]:
        from eagle3.draft.decode import ReferenceDraft, speculative_generate

        if sampling.temperature > 0:
            raise ValueError(
                f"the reference engine speculates only at temperature 0, got {sampling.temperature}; "
                "use engine: vllm"
            )
        speculation = self.settings.speculation
        assert speculation is not None
        embedding = self.model.get_input_embeddings().weight
        draft = ReferenceDraft.load(speculation.draft_dir, embedding, self.model.dtype)
        for i, prompt in enumerate(prompts):
            token_ids, rounds, accepted = speculative_generate(
                self.model, draft, prompt, sampling.max_new_tokens, speculation.num_tokens, end_ids
            )
            self.num_drafts += rounds
            self.accepted = [a + b for a, b in zip(self.accepted, accepted, strict=True)]
            yield i, token_ids


def batches(lengths: list[int], max_rows: int) -> list[list[int]]:
    """Group row indices, longest rows first; a group has at most BATCH_TOKENS with padding, or one row."""
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
    """Pad to token ids [B, T] int64 and an attention mask [B, T] int64, 1 at tokens and 0 at padding."""
    width = max(map(len, token_ids))
    ids = torch.zeros(len(token_ids), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, tokens in enumerate(token_ids):
        real = slice(width - len(tokens), width) if left else slice(0, len(tokens))
        ids[row, real] = torch.tensor(tokens)
        mask[row, real] = 1
    return ids.to(device), mask.to(device)
