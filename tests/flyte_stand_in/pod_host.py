"""Starts pods' Python commands in a hundredth of the time: a process that has imported what every pod imports forks for each.

    python -I pod_host.py SOCKET      runs until its standard input closes

A pod finds `pyflyte-execute` and its like in a directory of stand-ins (`write_commands`). Each hands its command line,
environment, working directory and outputs to the host; the child of the host takes them over and calls flytekit's own entry point
of that name, which parses and executes the command line as ever. Nothing of this project is imported before the fork: that has to
come with the pod's code. Without these stand-ins on its PATH a pod runs the same commands as processes of their own.
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
COMMANDS = ("pyflyte-execute", "pyflyte-fast-execute", "pyflyte-map-execute")
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
    """Write the stand-ins for flytekit's commands, which ask the host at `address`."""
    directory.mkdir()
    for name in COMMANDS:
        (directory / name).write_text(CLIENT.format(python=sys.executable, address=address))
        (directory / name).chmod(0o755)


def main(address: str) -> None:
    """Import, then fork for each request."""
    for name in IMPORTED:
        import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who wait for pods
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
    """Read a request, fork the command, and tell its caller the exit code; a caller that is killed hears nothing."""
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
    """Be the command: its process group, outputs, directory, environment and command line; then flytekit's entry point."""
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
    """Make anew what flytekit made on import: its context, and a directory of this process's own for it to work in."""
    from flytekit.core.context_manager import FlyteContextManager
    from flytekit.core.data_persistence import default_local_file_access_provider

    default_local_file_access_provider._local_sandbox_dir = Path(tempfile.mkdtemp(prefix="flyte-"))
    FlyteContextManager.initialize()


def leave(command: Callable[[], None]) -> NoReturn:
    """Run a command and end as Python does, but without taking every imported module apart, which takes half a second."""
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
