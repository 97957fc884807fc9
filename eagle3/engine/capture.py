"""Captures a token shard: runs its rows through vLLM, checks the states and writes them, in bounded memory.

vLLM stores the wanted layers' states in its cache (`extract_hidden_states`) and the connector puts those of a
finished row on a queue. A thread reads the queue and gives the states to the writer. Each request generates
one greedy token; final norm and head on the captured last state must give the same token.
"""

import threading
import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle3.config.engine import ExtractConfig
from eagle3.engine.handover import captured
from eagle3.engine.interface import AddRow
from eagle3.shards.tokens import TokenRow
from eagle3.shards.writer import HiddenStateWriter
from eagle3.targets.weights import TargetTensors, load_target_tensors

# Host memory for states that wait for the writer. 4,096 tokens of an 8B model have 134 MB in bfloat16.
IN_FLIGHT_BYTES = 1 << 30
# Rows per chunk whose next token is checked: seconds of head matmul with a vocabulary of 150k.
CHECKED_ROWS = 64
MIN_AGREEMENT = 0.99
# Logits closer than this share of the largest are a tie: the engine's rounding can swap them.
TIE = {"float32": 1e-4, "bfloat16": 2**-6, "float16": 2**-9}
# An idle engine sends states within milliseconds; if none come for this long, they are lost.
STALL_S = 60.0
# Part of every shard's digest. If a change here, in connector.py or in reference.py changes the stored
# states, raise it and the cache version in workflows/tasks/extract_hidden_states.py.
CAPTURE_VERSION = 1


class ShardSink:
    """Writes rows' states, added in any order, and checks a sample of each chunk's next tokens.

    wanted: indices of the rows to capture, in the engine's order: chunk by chunk, and in each chunk the
    frames with the longest rows first, so that few long rows do not run alone at the end.
    """

    def __init__(
        self,
        rows: list[TokenRow],
        out: str | Path,
        num_aux: int,
        extract: ExtractConfig,
        info: dict[str, Any],
        target_dir: str | Path,
        dtype: str,
    ) -> None:
        self.rows = rows
        self.dtype = dtype
        target = load_target_tensors(target_dir)
        self.target = replace(target, embedding=target.head)  # frees the embedding
        hidden_size = target.head.shape[1]
        self.writer = HiddenStateWriter(out, rows, num_aux, hidden_size, extract, info, self._check_chunk)
        self.wanted: list[int] = []
        self.sampled: set[int] = set()
        for number, frames in enumerate(self.writer.plan):
            if number not in self.writer.entries:
                in_file = [row for frame in frames for row in frame]
                self.sampled.update(in_file[:: max(1, -(-len(in_file) // CHECKED_ROWS))])
                longest_first = sorted(frames, key=lambda f: -max(len(rows[r].token_ids) for r in f))
                self.wanted += [row for frame in longest_first for row in frame]
        self.samples: dict[int, tuple[Tensor, int]] = {}
        self.counts = [entry["checks"] for entry in self.writer.entries.values()]

    def add(self, row: int, states: Tensor, next_token: int) -> None:
        """Add one row.

        Args:
            row: its index in the shard.
            states: [T, A + 1, H] engine dtype, CPU.
            next_token: the engine's greedy token after the row.
        """
        if row in self.sampled:
            self.samples[row] = (states[-1, -1].clone(), next_token)
        self.writer.add(row, states)

    def close(self) -> dict[str, Any]:
        return self.writer.close()

    def _check_chunk(self, rows: list[int]) -> dict[str, int]:
        """Return a finished chunk's counts for the manifest, or raise if too few next tokens agree so far."""
        samples = [self.samples.pop(row) for row in rows if row in self.sampled]
        agreed = count_agreements(samples, self.target, self.dtype)
        # Sound: the thread and the writer have checked each row's token ids, length and states.
        counts = {"rows_sound": len(rows), "next_tokens_checked": len(samples), "next_tokens_agreed": agreed}
        self.counts.append(counts)
        all_checked = sum(c["next_tokens_checked"] for c in self.counts)
        all_agreed = sum(c["next_tokens_agreed"] for c in self.counts)
        if all_checked - all_agreed > max(all_checked > 1, (1 - MIN_AGREEMENT) * all_checked):
            raise RuntimeError(
                f"the last hidden state reproduces the target's next token in only {all_agreed} of "
                f"{all_checked} rows, {MIN_AGREEMENT:.0%} must agree; the engine numbers layers or applies "
                "the final norm in an unexpected way"
            )
        return counts


def count_agreements(samples: list[tuple[Tensor, int]], target: TargetTensors, dtype: str) -> int:
    """Count the last states that give the engine's token through final norm and head.

    A state of another layer fails, and so does one after the norm.

    Args:
        samples: at least one pair of a last state [H] (engine dtype, before the norm) and the engine's token.
        target: its final norm and head, float32.
        dtype: the engine's, which sets the tolerance.
    """
    states = torch.stack([state for state, _ in samples]).float()
    chosen = torch.tensor([token for _, token in samples])
    normed = states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + target.norm_eps) * target.norm_weight
    logits = normed @ target.head.T
    gap = logits.amax(-1) - logits.gather(-1, chosen[:, None])[:, 0]
    return int((gap <= TIE[dtype] * logits.abs().amax(-1)).sum())


class _Drain(threading.Thread):
    """Reads the connector's queue. is_waiting: for an item. failure: the error that ended the thread."""

    def __init__(self, rows: list[TokenRow], add_row: AddRow) -> None:
        super().__init__(name="hidden-states", daemon=True)
        self.rows = rows
        self.add_row = add_row
        self.index_of: dict[str, int] = {}
        self.next_token: dict[int, int] = {}
        self.num_tokens = 0
        self.is_waiting = False
        self.failure: Exception | None = None

    def run(self) -> None:
        try:
            for _ in self.rows:
                self.is_waiting = True
                item = captured.get()
                self.is_waiting = False
                item.copied.synchronize()
                index = self.index_of.pop(item.request_id)
                row = self.rows[index]
                if item.token_ids.tolist() != row.token_ids:
                    raise RuntimeError(f"row {row.sample_id}: the engine returned different token ids")
                self.add_row(index, item.states, self.next_token.pop(index))
                self.num_tokens += len(row.token_ids)
        except Exception as e:  # capture_with_vllm raises it
            self.failure = e

    def stalled(self) -> RuntimeError:
        missing = [self.rows[i].sample_id for i in self.index_of.values()]
        return RuntimeError(
            f"the engine finished rows {missing[:8]} without sending their states; run the shard again"
        )


class _Feed:
    """Adds rows to the engine in order, within limits on its queue and on the memory of states in flight."""

    def __init__(
        self, engine: Any, rows: list[TokenRow], drain: _Drain, bytes_per_token: int, max_requests: int
    ) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self.engine = engine
        self.drain = drain
        self.waiting = deque(enumerate(rows))
        self.max_tokens = IN_FLIGHT_BYTES // bytes_per_token
        self.max_requests = max_requests
        self.params = SamplingParams(
            temperature=0,
            max_tokens=1,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self.num_tokens = 0

    def fill(self) -> None:
        from vllm.inputs import tokens_input

        room = self.max_tokens - (self.num_tokens - self.drain.num_tokens)
        while self.waiting and room > 0 and self.engine.get_num_unfinished_requests() < self.max_requests:
            index, row = self.waiting.popleft()
            request_id = self.engine.add_request(str(index), tokens_input(row.token_ids), self.params)
            self.drain.index_of[request_id] = index
            self.num_tokens += len(row.token_ids)
            room -= len(row.token_ids)


def capture_with_vllm(
    engine: Any, rows: list[TokenRow], add_row: AddRow, bytes_per_token: int, max_num_seqs: int
) -> int:
    """Run every row through the engine; another thread calls `add_row` with each row's states, in any order.

    Args:
        engine: vLLM's LLMEngine with eagle3.engine.connector.
        bytes_per_token: size of the states, to bound the memory in flight.
        max_num_seqs: the engine's; its queue holds twice as many rows.

    Returns:
        Number of tokens found in the prefix cache.
    """
    drain = _Drain(rows, add_row)
    feed = _Feed(engine, rows, drain, bytes_per_token, 2 * max_num_seqs)
    drain.start()
    cached_tokens = 0
    num_seen = 0
    progress_at = time.monotonic()
    while drain.is_alive():
        feed.fill()
        busy = engine.has_unfinished_requests()
        if not busy and not drain.is_waiting:  # the engine is idle until the writer catches up
            progress_at = time.monotonic()
            time.sleep(0.001)
            continue
        # A row's states arrive one step after its token, so an engine without requests needs more steps.
        for output in engine.step():
            drain.next_token[int(output.request_id)] = output.outputs[0].token_ids[0]
            cached_tokens += output.num_cached_tokens or 0
        if busy or drain.num_tokens > num_seen:
            progress_at = time.monotonic()
            num_seen = drain.num_tokens
        elif time.monotonic() - progress_at > STALL_S:
            raise drain.stalled()
        else:
            time.sleep(0.001)
    if drain.failure is not None:
        raise drain.failure
    return cached_tokens
