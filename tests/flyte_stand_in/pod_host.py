"""Starts the Python commands of pods in milliseconds: a process imports what every pod imports, then forks for each pod.

    python -I pod_host.py SOCKET      runs until its standard input closes

`write_commands` puts clients named `pyflyte-execute` and so on into a directory of the pod's PATH. A client sends its
command line, environment, working directory and outputs to the host. The host forks a child, which calls flytekit's
own entry point of that name. Nothing of this project is imported before the fork: it must come with the pod's code.
"""

import atexit
import json
import os
import select
import signal
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NoReturn

IMPORTED = (
    "flytekit.bin.entrypoint",
    "flytekit.extras.accelerators",
    "s3fs",
    "pydantic",
    "pyarrow.parquet",
    "safetensors.torch",
)
IMPORTED += ("torch", "transformers.models.auto.tokenization_auto")
COMMANDS = ("pyflyte-execute", "pyflyte-fast-execute")
# -S and -E: without site-packages it starts in 20 ms.
CLIENT = """#!{python} -SE
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as host:
    host.connect({address!r})
    request = json.dumps(dict(argv=sys.argv, env=dict(os.environ), cwd=os.getcwd(), group=os.getpgid(0))).encode()
    socket.send_fds(host, [len(request).to_bytes(4, "big")], [1, 2])
    host.sendall(request)
    sys.exit(int.from_bytes(host.recv(1) or b"\\x01", "big"))
"""


def write_commands(directory: Path, address: str) -> None:
    """Write the clients that stand in for flytekit's commands; they connect to the host at `address`."""
    directory.mkdir()
    for name in COMMANDS:
        (directory / name).write_text(CLIENT.format(python=sys.executable, address=address))
        (directory / name).chmod(0o755)


def main(address: str) -> None:
    """Import, then fork for each request."""
    for name in IMPORTED:
        import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the children that wait for pods
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address)
        server.listen(16)
        print("ready", flush=True)
        while server in select.select([server, sys.stdin], [], [])[0]:
            connection, _ = server.accept()
            if os.fork() == 0:
                server.close()
                attend(connection)
            connection.close()


def attend(connection: socket.socket) -> None:
    """Read a request, fork the command and send its exit code to the client, if that still runs."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    header, outputs, _, _ = socket.recv_fds(connection, 4, 2)
    with connection.makefile("rb") as stream:
        request = json.loads(stream.read(int.from_bytes(header, "big")))
    if (pid := os.fork()) == 0:
        connection.close()
        become(request, outputs)
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    try:
        connection.sendall(bytes([code if code >= 0 else 128 - code]))
    finally:
        os._exit(0)


def become(request: dict[str, Any], outputs: list[int]) -> None:
    """Take over the process group, outputs, directory, environment and command line, then run flytekit's entry point."""
    os.setpgid(0, request["group"])
    for number, output in enumerate(outputs, 1):
        os.dup2(output, number)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    tempfile.tempdir = None  # read from the environment again
    sys.path[:0] = [str(Path(p).resolve()) for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    sys.argv = request["argv"]
    name = Path(sys.argv[0]).name
    refresh_flytekit()
    (entry,) = entry_points(group="console_scripts", name=name)
    leave(entry.load())


def refresh_flytekit() -> None:
    """Recreate what flytekit creates on import: its context, and a working directory of this process."""
    from flytekit.core.context_manager import FlyteContextManager
    from flytekit.core.data_persistence import default_local_file_access_provider

    default_local_file_access_provider._local_sandbox_dir = Path(tempfile.mkdtemp(prefix="flyte-"))
    FlyteContextManager.initialize()


def leave(command: Callable[[], None]) -> NoReturn:
    """Run a command and exit as Python does, but without the half second that unloading all modules takes."""
    code: object = 0
    try:
        command()
    except SystemExit as e:
        code = e.code
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    main(sys.argv[1])
