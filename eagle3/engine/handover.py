"""Moves captured states from vLLM's worker to the `captured` queue of the process that drives the engine.

With one rank, the worker runs in that process and the connector writes to `captured` directly. With several,
workers are child processes: a thread of rank 0 sends its states over a Unix socket and a thread of the driver
writes them to `captured`. Nothing is unpickled from the socket.
"""

import json
import threading
from dataclasses import dataclass
from multiprocessing import current_process
from multiprocessing.connection import Client, Connection, Listener
from queue import Queue, SimpleQueue
from typing import Any

import torch
from torch import Tensor

from eagle3.sockets import make_socket_dir

SENDER_ROWS = 8


@dataclass(frozen=True)
class CapturedStates:
    """States of one request; call `copied.synchronize()` before reading `states`.

    token_ids: [T] int64, read by the engine. states: [T, L, H] engine dtype, layers in ascending order.
    """

    request_id: str
    token_ids: Tensor
    states: Tensor
    copied: Any


class Copied:
    """Replaces a CUDA event where the copy is already complete."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


captured: SimpleQueue[CapturedStates] = SimpleQueue()


class Receiver:
    """Listens for rank 0; the connector connects to `address`."""

    def __init__(self) -> None:
        make_socket_dir()
        # vLLM's workers are multiprocessing children and inherit the key.
        self.listener = Listener(family="AF_UNIX", authkey=current_process().authkey)
        self.address = str(self.listener.address)
        threading.Thread(target=self._receive, name="receive-states", daemon=True).start()

    def _receive(self) -> None:
        connection = self.listener.accept()
        self.listener.close()
        while True:
            try:
                captured.put(receive(connection))
            except EOFError:  # the worker ended; the driver notices it elsewhere
                return


class Sender:
    """Rank 0's side: a thread sends items in order while the engine continues."""

    def __init__(self, address: str) -> None:
        self.connection: Connection = Client(address, "AF_UNIX", authkey=current_process().authkey)
        self.waiting: Queue[CapturedStates] = Queue(SENDER_ROWS)
        threading.Thread(target=self._send, name="send-states", daemon=True).start()

    def put(self, item: CapturedStates) -> None:
        """Queue an item; blocks while the queue is full."""
        self.waiting.put(item)

    def _send(self) -> None:
        while True:
            send(self.connection, self.waiting.get())


def send(connection: Connection, item: CapturedStates) -> None:
    """Write one item: a JSON header, the token ids, the states."""
    item.copied.synchronize()
    states = item.states.contiguous()
    dtype = str(states.dtype).removeprefix("torch.")
    header = {"request_id": item.request_id, "shape": list(states.shape), "dtype": dtype}
    connection.send_bytes(json.dumps(header).encode())
    for tensor in (item.token_ids, states):
        connection.send_bytes(tensor.view(torch.uint8).numpy().reshape(-1).data)


def receive(connection: Connection) -> CapturedStates:
    """Read one item; raises EOFError if the sender closed the connection."""
    header = json.loads(connection.recv_bytes())
    token_ids = torch.empty(header["shape"][0], dtype=torch.int64)
    states = torch.empty(header["shape"], dtype=getattr(torch, header["dtype"]))
    for tensor in (token_ids, states):
        connection.recv_bytes_into(tensor.view(torch.uint8).numpy().reshape(-1).data)
    return CapturedStates(header["request_id"], token_ids, states, Copied())
