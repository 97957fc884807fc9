"""The table of all tasks in README.md, from the tasks themselves: what each asks for, how often and how long it may run.

python -m workflows.table
"""

from dataclasses import astuple, dataclass, fields
from datetime import timedelta
from typing import Any

import images
from workflows.tasks import (
    build_vocab,
    collect_agent_traces,
    describe_rows,
    evaluate_draft,
    export_draft,
    extract_hidden_states,
    fetch_target,
    gather_token_shards,
    list_shards,
    plan_run,
    prepare_data,
    prepare_heldout,
    promote_draft,
    regenerate_responses,
    resolve_inputs,
    summarize_run,
    take_shards,
    train_draft,
)

# In the order of a run; the @dynamic ones, which only start others, come behind what they start.
TASKS: list[Any] = [
    resolve_inputs.resolve_inputs,
    fetch_target.fetch_target,
    fetch_target.fetch_tokenizer,
    prepare_data.prepare_data,
    regenerate_responses.regenerate_shard,
    collect_agent_traces.collect_shard,
    gather_token_shards.gather_token_shards,
    build_vocab.build_vocab,
    extract_hidden_states.extract_shard,
    extract_hidden_states.gather_hidden_states,
    train_draft.train_draft,
    export_draft.export_draft,
    evaluate_draft.evaluate_draft,
    describe_rows.describe_rows,
    summarize_run.summarize_run,
    prepare_data.show_data,
    plan_run.plan_run,
    resolve_inputs.resolve_without_data,
    prepare_heldout.prepare_heldout,
    take_shards.take_token_shards,
    take_shards.take_hidden_states,
    take_shards.join_token_shards,
    list_shards.list_token_shards,
    list_shards.list_hidden_states,
    promote_draft.find_current_draft,
    promote_draft.check_current_draft,
    promote_draft.choose_opponent,
    promote_draft.promote_draft,
    fetch_target.fetch_target_node,
    prepare_data.prepare_data_node,
    prepare_data.report_data,
    regenerate_responses.regenerate_responses,
    collect_agent_traces.collect_agent_traces,
    extract_hidden_states.extract_hidden_states,
    train_draft.train_draft_node,
    evaluate_draft.evaluate_draft_node,
]


@dataclass(frozen=True)
class Row:
    """One line of the table, as text. requests, limits: cores, memory, local disk, GPUs where there are any."""

    task: str
    image: str
    requests: str
    limits: str
    accelerator: str
    cache: str
    retries: str
    timeout: str
    interruptible: str


def row_of(task: Any) -> Row:
    """What a task's decorator says."""
    meta, resources = task.metadata, task.resources
    accelerator = task.accelerator.to_flyte_idl().device if task.accelerator else "-"
    return Row(
        task=f"`{task.name.rsplit('.', 1)[-1]}`",
        image="gpu" if task.container_image == images.GPU else "cpu",
        requests=_quantities(resources.requests),
        limits=_quantities(resources.limits),
        accelerator=accelerator,
        cache=meta.cache_version or "-",
        retries=str(meta.retries),
        timeout=timeout_text(meta.timeout),
        interruptible="yes" if meta.interruptible else "no",
    )


def _quantities(side: Any) -> str:
    return quantities_text(side.cpu, side.mem, side.ephemeral_storage, side.gpu)


def quantities_text(cpu: str, mem: str, disk: str, gpu: str | None) -> str:
    """One side of the resources in one cell."""
    return f"{cpu}, {mem}, {disk}" + (f", {gpu} GPU" if gpu else "")


def timeout_text(timeout: timedelta) -> str:
    """In days where it is several, else in hours."""
    return f"{timeout.days} d" if timeout.days > 1 else f"{timeout.total_seconds() / 3600:.0f} h"


def render() -> str:
    """The table in Markdown."""
    names = [field.name for field in fields(Row)]
    lines = ["| " + " | ".join(cells) + " |" for cells in (names, *(astuple(row_of(task)) for task in TASKS))]
    return "\n".join([lines[0], "|---" * len(names) + "|", *lines[1:]])


if __name__ == "__main__":
    print(render())
