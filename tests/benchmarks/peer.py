"""The peer's side: speculators' own training command on synthetic states, in a process of its own, under its
own interpreter.

Its config, model, dataset, packing, optimizer and Trainer run as they are. Two calls that need an accelerator
are redirected to the CPU; attention and loss take the forms that it has for a CPU (its defaults are
FlexAttention and Triton).
"""

import tempfile
from argparse import Namespace
from typing import Any

import speculators.train.cli as cli
import speculators.train.trainer as trainer
import torch
from speculators.train.config import TrainConfig

from tests.benchmarks.meter import StepMeter, read_arguments
from tests.benchmarks.states import SMOLLM2


def command_line(arguments: Namespace, save_path: str) -> list[str]:
    """What differs from the peer's defaults: paths, sizes, AdamW as in ours.py, float32, full attention, no
    log, no worker.
    """
    settings = {
        "verifier-name-or-path": arguments.states / "target",
        "data-path": arguments.states / "peer",
        "save-path": save_path,
        "speculator-type": "eagle3",
        "draft-vocab-size": SMOLLM2.draft_vocab,
        "total-seq-len": arguments.pack_tokens,
        "hidden-states-dtype": "float32",
        "draft-attn-impl": "sdpa",
        "full-attention-indices": 0,
        "loss-implementation": "eager",
        "ttt-steps": 3,
        "optimizer": "adamw",
        "lr": 1e-4,
        "scheduler-type": "none",
        "max-steps": arguments.warmup + arguments.steps,
        "epochs": 1,
        "log-freq": 1_000_000,
        "num-workers": 0,
        "on-missing": "raise",
        "mask-token-id": 0,
    }
    words = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    return [*words, "--target-layer-ids", *map(str, SMOLLM2.layer_ids)]


def redirect_to_cpu() -> None:
    """0.9.0 starts on accelerators only: it moves the model to device 0 and waits for the accelerator where
    it logs.
    """
    trainer.get_local_rank = lambda: "cpu"
    torch.accelerator.synchronize = lambda *_: None


def record_loader() -> list[Any]:
    """A list that will hold the training loader once the peer has made it."""
    make, loaders = cli.create_train_val_loaders, []

    def make_and_record(**settings: Any) -> Any:
        made = make(**settings)
        loaders.append(made[0])
        return made

    cli.create_train_val_loaders = make_and_record
    return loaders


def main() -> None:
    arguments = read_arguments(__doc__)
    redirect_to_cpu()
    loaders, meter = record_loader(), StepMeter(arguments.warmup, arguments.steps)
    with tempfile.TemporaryDirectory() as save_path:
        cli.main(TrainConfig.resolve(command_line(arguments, save_path)))
    lengths = loaders[0].dataset.approx_lengths
    tokens = {sum(lengths[row] for row in pack) for pack in loaders[0].batch_sampler}
    if tokens != {arguments.pack_tokens}:
        raise ValueError(
            f"every pack must hold {arguments.pack_tokens} tokens, got packs of {sorted(tokens)}; "
            "change the rows"
        )
    meter.write(arguments.results, arguments.pack_tokens)


if __name__ == "__main__":
    main()
