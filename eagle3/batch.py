"""Axis legend and the packed training batch.

    T  tokens in a pack, rows laid end to end      S  supervised slots           I  TTT steps
    A  aux layers      H  hidden size              M  positions with a last hidden state
    V  target vocabulary      K  draft vocabulary  N  query heads   G  key/value heads   D  head size

Slot p pairs token t[p+1] with the aux states of p; at TTT step i its label is t[p+2+i] (from 0). Four answer tokens a b c E after
a prompt token x, loss mask 0 1 1 1 1, three steps; "." is never served and never trained:

    p      token p   mask[p]   token fed at steps 0 1 2   label at steps 0 1 2
    0      x         0         a b c                      b c E
    1      a         1         b c .                      c E .
    2      b         1         c . .                      E . .
    3      c         1         . . .                      . . .
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from eagle3.shards import HiddenStateRow


@dataclass(frozen=True)
class PackedBatch:
    """Rows of one pack and the slots that are trained.

    token_ids [T] int64; positions [T] int64, place within the row; row_starts [R + 1] int64; aux [T, A, H]; last [M, H];
    slots [S] int64, pack positions p trained at step 0, ascending; valid [I, S] bool, True where slot s is trained at step i;
    last_index [I, S] int64, row of `last` that holds position p + 1 + i (0 where not valid); sample_ids: R ids.
    """

    token_ids: Tensor
    positions: Tensor
    row_starts: Tensor
    aux: Tensor
    last: Tensor
    slots: Tensor
    valid: Tensor
    last_index: Tensor
    sample_ids: list[str]

    def fed_ids(self, step: int) -> Tensor:
        """[S] int64: token fed at `step`, t[p + 1 + step]; clamped to the pack where the slot is not valid."""
        return self.token_ids[(self.slots + 1 + step).clamp(max=len(self.token_ids) - 1)]

    def labels(self) -> Tensor:
        """[I, S] int64: target token ids that each step should guess, t[p + 2 + i]; meaningless where not valid."""
        steps = torch.arange(len(self.valid), device=self.slots.device)[:, None]
        return self.token_ids[(self.slots + 2 + steps).clamp(max=len(self.token_ids) - 1)]

    def to(self, device: torch.device | str) -> "PackedBatch":
        """Copy to a device."""
        moved: dict[str, Any] = {k: v.to(device, non_blocking=True) for k, v in vars(self).items() if isinstance(v, Tensor)}
        return replace(self, **moved)


def valid_steps(loss_mask: Tensor, num_steps: int) -> Tensor:
    """Which (step, position) pairs serving drafts: loss_mask[p+1] and … and loss_mask[p+2+i].

    Args:
        loss_mask: [T] bool of one row; a run of True is one turn.
        num_steps: I.

    Returns:
        [I, T] bool.
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
    """Lay rows end to end and collect the supervised slots.

    Args:
        rows: at least one conversation; states in any float dtype.
        num_steps: I.
    """
    lengths = torch.tensor([len(r.token_ids) for r in rows])
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    total = int(starts[-1])
    slots, valid, last_positions = [], [], []
    for row, start in zip(rows, starts.tolist(), strict=False):
        steps = valid_steps(row.loss_mask, num_steps)
        kept = torch.nonzero(steps[0]).flatten()
        slots.append(kept + start)
        valid.append(steps[:, kept])
        last_positions.append(row.last_positions + start)
    index_of = torch.full((total + num_steps + 1,), -1, dtype=torch.int64)
    all_last = torch.cat(last_positions)
    index_of[all_last] = torch.arange(len(all_last))
    all_slots, all_valid = torch.cat(slots), torch.cat(valid, dim=1)
    wanted = torch.stack([index_of[all_slots + 1 + i] for i in range(num_steps)])
    if (wanted[all_valid] < 0).any():
        raise ValueError("a supervised slot has no last hidden state; the shard's loss mask and last_positions disagree")
    return PackedBatch(
        token_ids=torch.cat([r.token_ids for r in rows]),
        positions=torch.cat([torch.arange(n) for n in lengths.tolist()]),
        row_starts=starts,
        aux=torch.cat([r.aux for r in rows]),
        last=torch.cat([r.last for r in rows]),
        slots=all_slots,
        valid=all_valid,
        last_index=torch.where(all_valid, wanted, 0),
        sample_ids=[r.sample_id for r in rows],
    )
