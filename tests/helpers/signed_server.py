"""A server on this machine for files at pre-signed URLs: no file without its signature."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

SIGNATURE = "X-Amz-Signature"


@contextmanager
def signed_server(directory: Path, accepted: list[str]) -> Iterator[str]:
    """Serve a directory's files; yields the server's URL.

    Args:
        accepted: valid signatures, may be changed while the server runs. As in a real store they are for GET.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked = urlsplit(self.path)
            file = directory / asked.path.lstrip("/")
            allowed = asked.query in [f"{SIGNATURE}={signature}" for signature in accepted]
            body = file.read_bytes() if allowed and file.is_file() else b""
            self.send_response((200 if file.is_file() else 404) if allowed else 403)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_HEAD(self) -> None:
            self.send_response(403)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
