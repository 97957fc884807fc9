"""multiprocessing's sockets in a temporary directory with a long path, as pytest and batch systems have."""

import os
import subprocess
import sys
from pathlib import Path

LISTEN = "from multiprocessing.connection import Listener; Listener(family='AF_UNIX').close()"
SHORTEN = "from eagle3.sockets import make_socket_dir; make_socket_dir(); "


def listens(code: str, temp_dir: Path) -> bool:
    temp_dir.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"TMPDIR": str(temp_dir)}
    root = Path(__file__).resolve().parents[1]
    return not subprocess.run([sys.executable, "-c", code], cwd=root, env=environment, check=False).returncode


def test_sockets_work_in_a_temporary_directory_with_a_long_path(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 100)
    assert not listens(LISTEN, long)
    assert listens(SHORTEN + LISTEN, long)
    assert not list(long.iterdir())


def test_sockets_stay_in_a_temporary_directory_with_a_short_path(tmp_path: Path) -> None:
    where = "from multiprocessing import util; import sys; sys.exit(util.get_temp_dir().startswith('/tmp/'))"
    assert listens(SHORTEN + where, Path("/var/tmp"))
