"""Axis legend and the packed training batch.

    T  tokens in a pack, rows laid end to end      S  supervised slots           I  TTT steps
    A  aux layers      H  hidden size              M  positions with a last hidden state   R  rows
    V  target vocabulary      K  draft vocabulary  N  query heads   G  key/value heads     D  head size

Slot p pairs token t[p+1] with the aux states of p; its label at TTT step i (from 0) is t[p+2+i]. Example:
four answer tokens a b c E after a prompt token x, loss mask 0 1 1 1 1, three steps. "." is neither served nor
trained:

    p      token p   mask[p]   token fed at steps 0 1 2   label at steps 0 1 2
    0      x         0         a b c                      b c E
    1      a         1         b c .                      c E .
    2      b         1         c . .                      E . .
    3      c         1         . . .                      . . .
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from eagle3.shards.hidden_states import HiddenStateRow


@dataclass(frozen=True)
class PackedBatch:
    """Rows of one pack and the slots that are trained.

    token_ids [T] int64; positions [T] int64, within the row; row_starts [R + 1] int64, row r is
    [row_starts[r], row_starts[r + 1]); aux [T, A, H]; slots [S] int64, pack positions p trained at step 0,
    ascending; slot_rows [S] int64, the row of each; last [S, H], last hidden state at p + 1; valid [I, S]
    bool, True where slot s is trained at step i; sample_ids: R ids.

    last[s + i] is the state at p + 1 + i that labels slot s at step i: if (s, i) is valid, the i positions
    after p are slots too.
    """

    token_ids: Tensor
    positions: Tensor
    row_starts: Tensor
    aux: Tensor
    last: Tensor
    slots: Tensor
    slot_rows: Tensor
    valid: Tensor
    sample_ids: list[str]

    def fed_ids(self, step: int) -> Tensor:
        """[S] int64: token fed at `step`, t[p + 1 + step]; clamped to the pack where a slot is not valid."""
        return self.token_ids[(self.slots + 1 + step).clamp(max=len(self.token_ids) - 1)]

    def labels(self) -> Tensor:
        """[I, S] int64: target token id to guess at step i, t[p + 2 + i]; undefined where not valid."""
        steps = torch.arange(len(self.valid), device=self.slots.device)[:, None]
        return self.token_ids[(self.slots + 2 + steps).clamp(max=len(self.token_ids) - 1)]

    def slot_weights(self, averaging: str) -> tuple[Tensor, int]:
        """[S] float32 weights and their sum: 1 per slot ("token"), or 1 per row, shared by its slots."""
        if averaging == "token":
            return torch.ones(len(self.slots), device=self.slots.device), len(self.slots)
        counts = torch.bincount(self.slot_rows, minlength=len(self.sample_ids))
        return 1 / counts[self.slot_rows].float(), int((counts > 0).sum())

    def without_slots(self) -> "PackedBatch":
        """The same rows with nothing to train, for a process that has no pack in a step."""
        slots, rows, last = self.slots[:0], self.slot_rows[:0], self.last[:0]
        return replace(self, slots=slots, slot_rows=rows, last=last, valid=self.valid[:, :0])

    def pin_memory(self) -> "PackedBatch":
        """Copy into page-locked memory."""
        return self._map(Tensor.pin_memory)

    def to(self, device: torch.device | str) -> "PackedBatch":
        """Copy to a device."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def _map(self, change: Callable[[Tensor], Tensor]) -> "PackedBatch":
        tensors: dict[str, Any] = {k: change(v) for k, v in vars(self).items() if isinstance(v, Tensor)}
        return replace(self, **tensors)


def valid_steps(loss_mask: Tensor, num_steps: int) -> Tensor:
    """The (step, position) pairs that serving drafts: loss_mask[p+1] and … and loss_mask[p+2+i].

    loss_mask: [T] bool of one row; a run of True is one turn. Returns [I, T] bool.
    """
    padded = torch.cat([loss_mask, loss_mask.new_zeros(num_steps + 2)])
    length = len(loss_mask)
    alive = padded[1 : length + 1]
    steps = []
    for i in range(num_steps):
        alive = alive & padded[2 + i : length + 2 + i]
        steps.append(alive)
    return torch.stack(steps)


def pack_rows(rows: list[HiddenStateRow], num_steps: int) -> PackedBatch:
    """Concatenate rows, at least one, and collect the supervised slots of I = num_steps steps."""
    lengths = torch.tensor([len(r.token_ids) for r in rows])
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    slots, slot_rows, valid, last = [], [], [], []
    for number, (row, start) in enumerate(zip(rows, starts.tolist(), strict=False)):
        steps = valid_steps(row.loss_mask, num_steps)
        kept = torch.nonzero(steps[0]).flatten()
        # A row supervised from its first token has a last state at position 0, which labels no slot.
        labelling = row.last_positions > 0
        if not torch.equal(row.last_positions[labelling], kept + 1):
            raise ValueError(
                f"row {row.sample_id}: last hidden states must be at the {len(kept)} positions that its loss "
                f"mask trains, found {int(labelling.sum())}; extract its shard again"
            )
        slots.append(kept + start)
        slot_rows.append(torch.full_like(kept, number))
        valid.append(steps[:, kept])
        last.append(row.last[labelling])
    return PackedBatch(
        token_ids=torch.cat([r.token_ids for r in rows]),
        positions=torch.cat([torch.arange(n) for n in lengths.tolist()]),
        row_starts=starts,
        aux=torch.cat([r.aux for r in rows]),
        last=torch.cat(last),
        slots=torch.cat(slots),
        slot_rows=torch.cat(slot_rows),
        valid=torch.cat(valid, dim=1),
        sample_ids=[r.sample_id for r in rows],
    )
