"""The files in which a vLLM server hands over hidden states: the command line of such a server, and the reader.

The protocol is that of vLLM's ExampleHiddenStatesConnector. A response names PATH; PATH.lock is there already, locked by the
writer until PATH is complete. The reader waits for the lock, reads, and deletes both. Server and reader see one directory under
one name: a memory file system of the same host, or a shared volume. vLLM writes the files for its own user only.
"""

import asyncio
import fcntl
import json
import shlex
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from eagle3.config.engine import EngineConfig

# For the command line in error messages; the server may use any other.
USUAL_DIR = "/dev/shm/eagle3-states"
# A finished request's states are written at once; a lock held for longer belongs to a writer that hangs.
WRITER_TIMEOUT_S = 60.0
POLL_S = 0.005
# A file is read within seconds; after an hour its reader is gone.
ORPHAN_AGE_S = 3600.0


def serve_line(
    target_dir: str | Path, layer_ids: list[int], engine: EngineConfig, shared_dir: str | Path = USUAL_DIR
) -> str:
    """The shell command of a server whose states can be captured, in an environment in which this package is installed.

    Args:
        layer_ids: aux layers; the last layer is added.
        shared_dir: where the server writes and the capturing process reads; one name on both sides, best in memory.
    """
    speculation = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {
            "hf_config": {"eagle_aux_hidden_state_layer_ids": captured_ids(layer_ids, target_dir)}
        },
    }
    transfer = {
        "kv_connector": "HiddenStatesFileConnector",
        "kv_connector_module_path": "eagle3.engine.server.file_connector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {
            "shared_storage_path": str(shared_dir),
            "use_synchronization_lock": True,
        },
    }
    arguments = {
        "--model": target_dir,
        # vLLM's own default is every interface, for whoever reaches it.
        "--host": "127.0.0.1",
        "--dtype": engine.dtype,
        # One more token than the longest row: each row is followed by one generated token, which is never computed.
        "--max-model-len": engine.max_model_len + 1,
        "--max-num-seqs": engine.max_num_seqs,
        "--max-num-batched-tokens": engine.max_num_batched_tokens,
        "--gpu-memory-utilization": engine.gpu_memory_utilization,
        "--speculative-config": json.dumps(speculation),
        "--kv-transfer-config": json.dumps(transfer),
    }
    words = [
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN=1",
        "python",
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--enable-prompt-tokens-details",
    ]
    words += ["--enforce-eager"] if engine.enforce_eager else []
    return " ".join(words + [shlex.quote(str(word)) for argument in arguments.items() for word in argument])


def captured_ids(layer_ids: list[int], target_dir: str | Path) -> list[int]:
    """The layers in a file, in the order of its columns: the wanted ones and the last, each once, ascending."""
    last = json.loads((Path(target_dir) / "config.json").read_text())["num_hidden_layers"]
    return sorted({*layer_ids, last})


@dataclass(frozen=True)
class RowStates:
    """One file. token_ids: [T] int64. states: [T, L, H] engine dtype. layer_ids: [L] int64; None from the stock connector."""

    token_ids: Tensor
    states: Tensor
    layer_ids: Tensor | None


async def written(path: str, timeout_s: float = WRITER_TIMEOUT_S) -> IO[bytes]:
    """Wait until the file is complete and return its lock, held until it is closed.

    Raises:
        FileNotFoundError: if there is no lock file: the directory is not the server's, or the server writes without locks.
        RuntimeError: if the writer keeps its lock.
    """
    end = time.monotonic() + timeout_s
    lock = open(path + ".lock", "rb")  # noqa: SIM115  # the caller closes it
    try:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return lock
            except BlockingIOError:
                if time.monotonic() > end:
                    raise RuntimeError(
                        f"{path}: the server has been writing for {timeout_s:.0f} s; see its log"
                    ) from None
            await asyncio.sleep(POLL_S)
    except BaseException:
        lock.close()
        raise


def take(path: str, lock: IO[bytes]) -> RowStates:
    """Read a complete file and delete it with its lock. The tensors stay valid: they are mapped, and freed with the last of them.

    Raises:
        RuntimeError: if the server failed to write it, or wrote it for another user.
    """
    with lock:
        try:
            tensors = load_file(path)
            found = RowStates(tensors["token_ids"], tensors["hidden_states"], tensors.get("layer_ids"))
        except PermissionError:
            raise RuntimeError(
                f"{path}: written for the server's user alone; run the server and this as one user"
            ) from None
        except (FileNotFoundError, SafetensorError, KeyError) as e:
            raise RuntimeError(
                f"{path}: the server failed to write this row's states ({type(e).__name__} {e}); its log says why, often a full "
                "memory file system: make it larger, or lower engine.max_num_seqs"
            ) from None
        remove(path)
    return found


def remove(path: str) -> None:
    """Delete a file and its lock, if there."""
    for name in (path, path + ".lock"):
        Path(name).unlink(missing_ok=True)


def sweep(directories: set[Path], session: str) -> None:
    """Delete what the server wrote and nobody read: for this session, and, an hour old, for sessions that were killed."""
    for directory in directories:
        for path in directory.glob("cmpl-eagle3-*"):
            with suppress(OSError):  # not worth a run whose states are all here
                if (
                    path.name.startswith(f"cmpl-{session}-")
                    or time.time() - path.stat().st_mtime > ORPHAN_AGE_S
                ):
                    path.unlink()
