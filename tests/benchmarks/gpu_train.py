"""The trainer on one H200: tokens/s, share of peak, peak memory, and the forms of attention compared.

    python -m tests.benchmarks.gpu_train                       Qwen3-8B's shapes, bfloat16; a few minutes
    python -m tests.benchmarks.gpu_train --device cpu --small  self-check: tiny shapes, no goals

States and weights are random, written to --out once; training is the real entry, data path included.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle3.config.training import TrainConfig
from eagle3.draft.attention import VisibleKeys, dense_attention, unroll_attention
from eagle3.draft.batch import valid_steps
from eagle3.shards.hidden_states import last_state_positions
from tests.benchmarks.meter import StepMeter
from tests.benchmarks.ours import SETTINGS, run_trainer
from tests.benchmarks.results import table, write_json
from tests.benchmarks.states import QWEN3_8B, ROW_TOKENS, TINY, Sizes, make_rows, write_ours, write_target

PEAK_FLOPS = 989e12  # H200, dense bfloat16
GOAL_TOKENS_PER_S = 1.3e5  # at 50 % supervised
ATTENTION_TOLERANCE = 0.02  # relative L2 distance from float32; a bfloat16 rounding is 0.004
TTT_STEPS: int = SETTINGS["ttt_steps"]
Attention = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def row_flops(loss_mask: Tensor, sizes: Sizes) -> float:
    """FLOPs that one row's part of a step needs, forward and backward; 2 for each multiply-add of a matrix
    product.

    A trained product costs its forward three times (values, gradient of the input, gradient of the weight);
    fc twice, since states get no gradient; the target's head once. Attention's backward counts as twice its
    forward: recomputation does not count. Norms, RoPE, softmax and optimizer are
    left out.

    Args:
        loss_mask: [T] bool of one row.
    """
    hidden, queries, keys = sizes.hidden, sizes.heads * sizes.head_dim, 2 * sizes.groups * sizes.head_dim
    valid = valid_steps(loss_mask, TTT_STEPS)
    length, slots, pairs = len(loss_mask), int(valid[0].sum()), int(valid.sum())
    seen = int(((torch.arange(length) + 1) * valid).sum())  # step-0 keys over all (slot, step) pairs
    layer = pairs * (2 * hidden * queries + queries * hidden + 3 * hidden * sizes.inner)
    key_values = (length + pairs - slots) * 2 * hidden * keys
    heads = pairs * hidden * sizes.draft_vocab
    trained = layer + key_values + heads + 2 * seen * queries
    fc = length * len(sizes.layer_ids) * hidden * hidden
    target_head = len(last_state_positions(loss_mask)) * hidden * sizes.draft_vocab
    return 2.0 * (3 * trained + 2 * fc + target_head)


def measure_training(
    root: Path, supervised: float, sizes: Sizes, pack_tokens: int, device: str, steps: int
) -> dict[str, Any]:
    """Train a few steps: tokens_per_s, step_ms, share_of_peak, peak_bytes (device memory; of the process on a
    CPU).
    """
    rows = make_rows(4 * pack_tokens // ROW_TOKENS, supervised, sizes.vocab)
    write_ours(root, rows, sizes, device)
    warmup = max(1, steps // 3)  # compilation falls into the first
    cfg = TrainConfig(pack_tokens=pack_tokens, device=device, epochs=-(-(warmup + steps) // 4), **SETTINGS)
    meter = StepMeter(warmup, steps)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory(dir=root) as out_dir:
        results = meter.results(run_trainer(root, cfg, Path(out_dir), warmup + steps))
    flops_per_token = sum(row_flops(torch.tensor(row.loss_mask), sizes) for row in rows) / (
        len(rows) * ROW_TOKENS
    )
    return {
        "supervised": supervised,
        "tokens_per_s": results["tokens_per_s"],
        "step_ms": 1e3 * pack_tokens / results["tokens_per_s"],
        "gflop_per_token": flops_per_token / 1e9,
        "share_of_peak": flops_per_token * results["tokens_per_s"] / PEAK_FLOPS,
        "peak_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else meter.peak_rss,
    }


def attention_forms(slots: Tensor, row_starts: Tensor, device: str) -> dict[str, Attention]:
    """The reference and the device's own form of the unroll's attention, for one pack (slots and row starts
    on the CPU).
    """
    keys = VisibleKeys.from_slots(slots, row_starts, torch.device(device))
    own = "flex" if device == "cuda" else "blockwise"
    return {"dense": partial(dense_attention, keys=keys), own: partial(unroll_attention, keys=keys)}


def attention_inputs(slots: Tensor, num_tokens: int, sizes: Sizes, dtype: torch.dtype) -> list[Tensor]:
    """q, k0, v0, own_k, own_v of the last TTT step, which has the most own keys; leaves with gradients."""
    generator = torch.Generator(slots.device).manual_seed(0)
    groups, own = (sizes.groups, sizes.head_dim), (TTT_STEPS - 1, len(slots))
    shapes = [(len(slots), sizes.heads, sizes.head_dim), *2 * [(num_tokens, *groups)], *2 * [(*own, *groups)]]
    values = [torch.randn(shape, generator=generator, device=slots.device).bfloat16() for shape in shapes]
    return [value.to(dtype).requires_grad_() for value in values]


def run_attention(form: Attention, inputs: list[Tensor]) -> list[Tensor]:
    """The output and the gradients of all inputs, under a fixed gradient of the output."""
    out = form(*inputs)
    grad = (
        torch.linspace(-1, 1, out.numel(), device=out.device, dtype=torch.float32)
        .view(out.shape)
        .to(out.dtype)
    )
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


def measure_attention(sizes: Sizes, pack_tokens: int, device: str, repeats: int) -> list[dict[str, Any]]:
    """Each form on one pack, half supervised: ms of forward and backward, relative L2 distance from the
    reference in float32.
    """
    row = valid_steps(torch.arange(ROW_TOKENS) >= ROW_TOKENS // 2, TTT_STEPS)[0]
    slots = torch.nonzero(row.repeat(pack_tokens // ROW_TOKENS)).flatten()
    forms = attention_forms(slots, torch.arange(0, pack_tokens + 1, ROW_TOKENS), device)
    slots = slots.to(device)
    exact = run_attention(forms["dense"], attention_inputs(slots, pack_tokens, sizes, torch.float32))
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    inputs = attention_inputs(slots, pack_tokens, sizes, dtype)
    wait = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    lines = []
    for name, form in forms.items():
        found = run_attention(form, inputs)
        distances = [float((a.float() - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]
        run_attention(form, inputs)
        wait()
        start = time.perf_counter()
        for _ in range(repeats):
            run_attention(form, inputs)
        wait()
        ms = 1e3 * (time.perf_counter() - start) / repeats
        lines.append(
            {"form": name, "ms": ms, "distance": distances[0], "gradient_distance": max(distances[1:])}
        )
    return lines


def missed_goals(training: list[dict[str, Any]], attention: list[dict[str, Any]]) -> list[str]:
    """A sentence for every goal that was missed."""
    missed = []
    for line in training:
        if line["supervised"] == 0.5 and line["tokens_per_s"] < GOAL_TOKENS_PER_S:
            missed.append(
                f"{line['tokens_per_s']:.0f} tokens/s at 50 % supervised, the goal is {GOAL_TOKENS_PER_S:.0f}"
            )
    for line in attention:
        if (far := max(line["distance"], line["gradient_distance"])) > ATTENTION_TOLERANCE:
            missed.append(
                f"{line['form']} attention is {far:.3f} from float32; "
                f"at most {ATTENTION_TOLERANCE} is rounding"
            )
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--small", action="store_true", help="tiny shapes")
    parser.add_argument("--steps", type=int, default=0, help="timed steps; 0: 24, or 2 with --small")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/bench/gpu"), help="states, some GB, and gpu.json"
    )
    arguments = parser.parse_args()
    small, device = arguments.small, arguments.device
    sizes, pack_tokens, steps = (TINY, 2048, 2) if small else (QWEN3_8B, 8192, 24)
    write_target(arguments.out / "target", sizes, device)
    training = []
    for supervised in (1.0, 0.5):
        training.append(
            measure_training(arguments.out, supervised, sizes, pack_tokens, device, arguments.steps or steps)
        )
        line = training[-1]
        print(
            f"{supervised:.0%} supervised: {line['tokens_per_s']:.0f} tokens/s, "
            f"{line['step_ms']:.1f} ms a step, "
            f"{line['share_of_peak']:.1%} of peak, {line['peak_bytes'] / 1e9:.1f} GB",
            flush=True,
        )
    attention = measure_attention(sizes, pack_tokens, device, 2 if small else 20)
    cells = [
        [s["form"], f"{s['ms']:.2f}", f"{s['distance']:.1e}", f"{s['gradient_distance']:.1e}"]
        for s in attention
    ]
    print(table(["attention", "ms", "distance", "of gradients"], cells))
    write_json(arguments.out / "gpu.json", {"training": training, "attention": attention})
    missed = [] if small else missed_goals(training, attention)
    print("\n".join(f"MISSED: {sentence}" for sentence in missed) or "done")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
