"""A KV connector that sends hidden states from vLLM's cache to the process that drives the engine.

vLLM loads it by its module path in `kv_transfer_config`. The stock connector decides when a request's states
are complete; this one sends them through eagle3.engine.handover, in the order of completion.
"""

from typing import Any

import torch
from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    PendingSave,
    extract_from_kv_cache,
)

from eagle3.engine.handover import CapturedStates, Copied, Sender, captured


class HiddenStatesConnector(ExampleHiddenStatesConnector):  # type: ignore[misc]
    """The stock connector with a queue (a socket if `sink_address` is set) instead of its file writer."""

    def wait_for_save(self) -> None:
        """Skip the stock connector's lock files: no file is written."""

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        address = self._kv_transfer_config.get_from_extra_config("sink_address", "")
        if self._is_tp_rank_zero:
            self._sink: Any = Sender(address) if address else captured

    def _submit_async_write(self, pending: PendingSave) -> None:
        if not self._is_tp_rank_zero:  # every rank holds the same states
            return
        cache = self._kv_cache
        length = len(pending.token_ids)
        block = self._block_size
        positions = torch.arange(length)
        slots = torch.tensor(pending.block_ids)[positions // block] * block + positions % block
        if cache.is_cuda:
            states, copied = self._copy_from_gpu(slots, length)
        else:
            states = extract_from_kv_cache(cache, slots, length)
            copied = Copied()
        self._req_copy_events[pending.req_id] = copied
        self._sink.put(CapturedStates(pending.req_id, pending.token_ids, states, copied))

    def _copy_from_gpu(self, slots: Tensor, length: int) -> tuple[Tensor, Any]:
        """Gather after the engine's queued kernels, on a side stream, and copy to pinned memory."""
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
