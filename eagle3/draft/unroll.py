"""The unroll (training-time test): the draft run for I steps the way serving runs it, on supervised slots only.

Step 0 gives every position a key and a value, and supervised slots a query. Step i feeds slot p the token t[p + 1 + i] and its
own state of step i - 1, at RoPE position p + i, and adds one key and value that only slot p sees.
"""

import torch
from torch import Tensor, nn

from eagle3.draft.attention import StepZeroKeys, unroll_attention
from eagle3.draft.batch import PackedBatch
from eagle3.draft.loss import chunk_slots
from eagle3.draft.model import DraftLayer, Eagle3Draft


def unroll(draft: Eagle3Draft, batch: PackedBatch, keys: StepZeroKeys | None = None) -> Tensor:
    """Run the draft over a pack.

    Args:
        draft: the draft.
        batch: S supervised slots, I steps.
        keys: what the slots see, where the caller has worked it out from the pack on the CPU already.

    Returns:
        [I, S, H] normed states: lm_head of entry [i, s] are the logits for batch.labels()[i, s]. Entries that are not
        batch.valid are finite and meaningless.
    """
    layer = draft.layers[0]
    assert isinstance(layer, DraftLayer)
    attention, slots = layer.self_attn, batch.slots
    keys = keys or StepZeroKeys.of(slots.cpu(), batch.row_starts.cpu(), slots.device)
    next_ids = batch.token_ids.roll(
        -1
    )  # the last position of a row gets a foreign token; no slot of the row sees its key
    x, residual = layer.attention_input(draft.embed(next_ids), draft.combine_aux(batch.aux))
    k0, v0 = attention.keys_values(x, batch.positions, draft.rope)
    x, residual, slot_positions = x[slots], residual[slots], batch.positions[slots]

    own_k = own_v = k0.new_empty(0, len(slots), *k0.shape[1:])
    states, pre = [], residual
    for step in range(len(batch.valid)):
        positions = slot_positions + step
        if step > 0:
            x, residual = layer.attention_input(draft.embed(batch.fed_ids(step)), draft.feedback(pre))
            k, v = attention.keys_values(x, positions, draft.rope)
            own_k, own_v = torch.cat([own_k, k[None]]), torch.cat([own_v, v[None]])
        q = attention.queries(x, positions, draft.rope)
        pre = layer.finish(residual, unroll_attention(q, k0, v0, own_k, own_v, keys))
        states.append(draft.norm(pre))
    return torch.stack(states)


class Unroll(nn.Module):
    """`unroll` as a module, for what works on modules: casting weights for one call, and torch's data parallelism."""

    def __init__(self, draft: Eagle3Draft) -> None:
        super().__init__()
        self.draft = draft

    def forward(self, batch: PackedBatch, keys: StepZeroKeys) -> Tensor:
        return unroll(self.draft, batch, keys)


def guess(states: Tensor, head: Tensor, target_ids: Tensor) -> Tensor:
    """The draft's first choices as target token ids.

    Args:
        states: [I, S, H] from `unroll`.
        head: [K, H] draft head, dtype of states.
        target_ids: [K] int64 target ids of the draft vocabulary.

    Returns:
        [I, S] int64.
    """
    size = chunk_slots(len(target_ids), states.device)
    steps = [torch.cat([(x @ head.T).argmax(-1) for x in step.split(size)]) for step in states]
    return target_ids[torch.stack(steps)]


def find_hits(guesses: Tensor, batch: PackedBatch) -> Tensor:
    """[I, S] bool: the guess is the token that stands there, on valid pairs; one outside the draft vocabulary is never hit."""
    return (guesses == batch.labels()) & batch.valid
