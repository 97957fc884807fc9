"""Hands hidden states from vLLM's cache to this process: a KV connector that writes no file per request.

Named in `kv_transfer_config` by its module path, so vLLM loads it without being patched. The stock connector decides *when* a
request's states are complete; this one decides *where* they go: onto `captured`, in host memory, in the order of completion.
Only in-process engines of one rank: the queue does not cross processes.
"""

from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    PendingSave,
    extract_from_kv_cache,
)


@dataclass(frozen=True)
class CapturedStates:
    """One request's states; read `states` only after `copied.synchronize()`.

    token_ids: [T] int64, as the engine saw them. states: [T, L, H] engine dtype, layers in ascending order.
    """

    request_id: str
    token_ids: Tensor
    states: Tensor
    copied: Any


captured: SimpleQueue[CapturedStates] = SimpleQueue()


class _HostCopy:
    """What a CUDA event is to an asynchronous copy, for a copy that is already done."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class HiddenStatesConnector(ExampleHiddenStatesConnector):  # type: ignore[misc]
    """The stock connector with its file writer replaced by a queue."""

    def wait_for_save(self) -> None:
        """No lock files, since there are no files."""

    def _submit_async_write(self, pending: PendingSave) -> None:
        cache = self._kv_cache
        length, block = len(pending.token_ids), self._block_size
        positions = torch.arange(length)
        slots = torch.tensor(pending.block_ids)[positions // block] * block + positions % block
        if cache.is_cuda:
            states, copied = self._copy_from_gpu(slots, length)
        else:
            states, copied = extract_from_kv_cache(cache, slots, length), _HostCopy()
        self._req_copy_events[pending.req_id] = copied
        captured.put(CapturedStates(pending.req_id, pending.token_ids, states, copied))

    def _copy_from_gpu(self, slots: Tensor, length: int) -> tuple[Tensor, Any]:
        """Gather on a side stream, after everything the engine has queued so far, and copy to pinned memory."""
        stream = self._get_copy_stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            device_slots = slots.pin_memory().to(self._kv_cache.device, non_blocking=True)
            on_device = extract_from_kv_cache(self._kv_cache, device_slots, length)
            states = torch.empty_like(on_device, device="cpu", pin_memory=True)
            states.copy_(on_device, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record(stream)
        return states, copied
