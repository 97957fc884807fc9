"""The directory of multiprocessing's sockets. Linux takes socket paths of at most 107 bytes."""

import tempfile
from multiprocessing import util

# multiprocessing adds up to 33 characters: /pymp-xxxxxxxx/listener-xxxxxxxx.
MAX_TEMP_DIR = 70


def make_socket_dir() -> None:
    """Make the directory of this process: in TMPDIR, or in /tmp if the path of TMPDIR is too long."""
    before = tempfile.gettempdir()
    if len(before) <= MAX_TEMP_DIR:
        return
    tempfile.tempdir = "/tmp"
    try:
        util.get_temp_dir()
    finally:
        tempfile.tempdir = before
