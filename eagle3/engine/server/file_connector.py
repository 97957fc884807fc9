"""Hands hidden states from a vLLM server to another process, one file a request: the stock connector, checkable, also on CPUs.

Named in the server's `--kv-transfer-config` by its module path, so this package has to be installed in the server's environment;
`eagle3.engine.server.state_files` holds the command line and the reader. Each file also names its layers, which the stock one does not.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    PendingSave,
    extract_from_kv_cache,
)

from eagle3.engine.handover import Copied


class HiddenStatesFileConnector(ExampleHiddenStatesConnector):  # type: ignore[misc]
    """Files of `hidden_states` [T, L, H] engine dtype, `token_ids` [T] int64 and `layer_ids` [L] int64, ascending."""

    def _submit_async_write(self, pending: PendingSave) -> None:
        if self._kv_cache.is_cuda:
            super()._submit_async_write(pending)
            return
        # The stock method copies through pinned memory and CUDA streams, which a CPU build lacks.
        if not self._is_tp_rank_zero:
            return
        length, block = len(pending.token_ids), self._block_size
        positions = torch.arange(length)
        slots = torch.tensor(pending.block_ids)[positions // block] * block + positions % block
        states = extract_from_kv_cache(self._kv_cache, slots, length).contiguous()
        tensors = {"hidden_states": states, "token_ids": pending.token_ids.clone()}
        lock = self._lock_fds.pop(pending.req_id, None)
        written = self._executor.submit(self._write_tensors, tensors, Copied(), pending.filename, lock)
        self._req_copy_events[pending.req_id] = Copied()
        self._req_futures[pending.req_id] = written
        written.add_done_callback(partial(self._on_write_done, pending.req_id))

    def _write_tensors(
        self, tensors: dict[str, Tensor], event: Any, filename: str, lock_fd: int | None
    ) -> None:
        draft = self._vllm_config.speculative_config.draft_model_config.hf_config
        layer_ids = torch.tensor(sorted(set(draft.eagle_aux_hidden_state_layer_ids)))
        super()._write_tensors({**tensors, "layer_ids": layer_ids}, event, filename, lock_fd)
