"""Captures one token shard: drives vLLM with bounded memory, restores the rows' order, checks what came back and writes it.

The engine fills its cache with the wanted layers' states (vLLM's `extract_hidden_states`), the connector puts a finished row's
states on a queue, a thread here takes them off, writes them and lets the next rows in. Each request generates one token: the
target's own choice after the row's last token, for which the stored last state must give the same argmax.
"""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from eagle3.config import ExtractConfig
from eagle3.shards import HiddenStateWriter, TokenRow
from eagle3.target.weights import load_target_tensors

# Host memory that captured, not yet written states may take. One 8B-model row of 4,096 tokens is 134 MB in bfloat16.
IN_FLIGHT_BYTES = 1 << 30
# Rows whose next token is checked; one head product over 256 rows costs seconds even for a 150k vocabulary.
CHECKED_ROWS = 256
MIN_AGREEMENT = 0.99
# Logits closer than this share of the largest are a tie: what one rounding of the engine's head output can swap.
TIE = {"float32": 1e-4, "bfloat16": 2**-6, "float16": 2**-9}
# An idle engine hands states over within milliseconds; a row whose states are lost would be waited for for ever.
STALL_S = 60.0
# Part of every shard's digest: raise it when a change here, in the connector or in reference.py changes what is stored.
CAPTURE_VERSION = 1
Add = Callable[[int, Tensor, int], None]


class ShardSink:
    """Takes rows' states in any order, writes them in shard order, and checks the last state against the engine at the end."""

    def __init__(self, rows: list[TokenRow], out_dir: str | Path, extract: ExtractConfig, info: dict[str, Any]) -> None:
        self.rows = rows
        self.writer = HiddenStateWriter(out_dir, extract.storage_dtype, extract.chunk_bytes, info)
        self.waiting: dict[int, tuple[Tensor, int]] = {}
        self.num_written = 0
        self.checked: list[tuple[Tensor, int]] = []

    def add(self, index: int, states: Tensor, next_token: int) -> None:
        """Hand over one row.

        Args:
            index: its place in the shard.
            states: [T, A + 1, H] host memory, engine dtype.
            next_token: the engine's greedy token after the row.
        """
        self.waiting[index] = (states, next_token)
        while self.num_written in self.waiting:
            states, next_token = self.waiting.pop(self.num_written)
            self.writer.add(self.rows[self.num_written], states)
            if len(self.checked) < CHECKED_ROWS:
                self.checked.append((states[-1, -1].clone(), next_token))
            self.num_written += 1

    def close(self, target_dir: str, dtype: str) -> dict[str, Any]:
        """Check the sample, write the manifest and return it."""
        check_last_states(self.checked, target_dir, dtype)
        return self.writer.close()


def check_last_states(checked: list[tuple[Tensor, int]], target_dir: str, dtype: str) -> None:
    """Refuse last states from which norm and head do not reproduce the engine's own next token: a layer early, or normed twice.

    Args:
        checked: pairs of a last state [H] and the token the engine chose there.
        target_dir: where the norm and the head are read from.
        dtype: the engine's.
    """
    target = load_target_tensors(target_dir)
    states = torch.stack([state for state, _ in checked]).float()
    chosen = torch.tensor([token for _, token in checked])
    normed = states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + target.norm_eps) * target.norm_weight
    logits = normed @ target.head.T
    gap = logits.amax(-1) - logits.gather(-1, chosen[:, None])[:, 0]
    agreement = (gap <= TIE[dtype] * logits.abs().amax(-1)).float().mean().item()
    if agreement < MIN_AGREEMENT:
        raise RuntimeError(
            f"the last hidden state reproduces the target's next token in only {agreement:.1%} of {len(checked)} rows, "
            f"{MIN_AGREEMENT:.0%} must agree; the engine's layer numbering or final norm is not the expected one"
        )


class _Drain(threading.Thread):
    """Takes finished rows off the connector's queue; `failure` holds what stopped it."""

    def __init__(self, rows: list[TokenRow], add: Add) -> None:
        super().__init__(name="hidden-states-writer", daemon=True)
        self.rows, self.add = rows, add
        self.index_of: dict[str, int] = {}
        self.next_token: dict[int, int] = {}
        self.num_tokens = 0
        self.failure: Exception | None = None

    def run(self) -> None:
        from eagle3.target.connector import captured

        try:
            for _ in self.rows:
                item = captured.get()
                item.copied.synchronize()
                index = self.index_of.pop(item.request_id)
                row = self.rows[index]
                if item.token_ids.tolist() != row.token_ids:
                    raise RuntimeError(f"row {row.sample_id}: the engine returned other token ids than it was sent")
                self.add(index, item.states, self.next_token.pop(index))
                self.num_tokens += len(row.token_ids)
        except Exception as e:  # shown by the thread that drives the engine
            self.failure = e


def capture_with_vllm(engine: Any, rows: list[TokenRow], add: Add, bytes_per_token: int, max_num_seqs: int) -> int:
    """Run every row through the engine and pass its states to `add`, from one other thread, in any order.

    Args:
        engine: vLLM's LLMEngine, in this process, set up with eagle3.target.connector.
        rows: at least one.
        add: gets a row's index, its states [T, A + 1, H] and the engine's next token.
        bytes_per_token: of the states, to bound what is in flight.
        max_num_seqs: the engine's; twice as many rows are kept in its queue.

    Returns:
        How many tokens were not computed, but found in the prefix cache.
    """
    from vllm import SamplingParams
    from vllm.inputs import tokens_input
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    params.output_kind = RequestOutputKind.FINAL_ONLY
    drain = _Drain(rows, add)
    drain.start()
    num_submitted = submitted_tokens = cached_tokens = 0
    moved_at, num_seen = time.monotonic(), 0
    with tqdm(total=sum(len(r.token_ids) for r in rows), desc="extract", unit="tok", mininterval=1, delay=2) as bar:
        while drain.is_alive():
            room = IN_FLIGHT_BYTES // bytes_per_token - (submitted_tokens - drain.num_tokens)
            while num_submitted < len(rows) and room > 0 and engine.get_num_unfinished_requests() < 2 * max_num_seqs:
                token_ids = rows[num_submitted].token_ids
                request_id = engine.add_request(str(num_submitted), tokens_input(token_ids), params)
                drain.index_of[request_id] = num_submitted
                num_submitted += 1
                submitted_tokens += len(token_ids)
                room -= len(token_ids)
            # A row's states leave the cache one step after its token: steps go on until the thread has them all.
            busy = engine.has_unfinished_requests()
            for output in engine.step():
                drain.next_token[int(output.request_id)] = output.outputs[0].token_ids[0]
                cached_tokens += output.num_cached_tokens or 0
            if busy or drain.num_tokens > num_seen:
                moved_at, num_seen = time.monotonic(), drain.num_tokens
            elif time.monotonic() - moved_at > STALL_S:
                missing = [rows[i].sample_id for i in drain.index_of.values()]
                raise RuntimeError(f"the engine is idle but the states of rows {missing[:8]} never came; run the shard again")
            else:
                time.sleep(0.001)
            bar.update(drain.num_tokens - bar.n)
        bar.update(drain.num_tokens - bar.n)
    if drain.failure is not None:
        raise drain.failure
    return cached_tokens
