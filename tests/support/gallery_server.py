# SPDX-License-Identifier: Apache-2.0
"""Serves the chart gallery and the dashboard's own static files, to tests and to eyes (as a program: on port 8731)."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlsplit

from fedvitals.dashboard.files import TYPES, WRITTEN
from support.waiting import PATIENCE

GALLERY = Path(__file__).resolve().parent / "chart_gallery"
STATIC = Path(__file__).resolve().parents[2] / "src" / "fedvitals" / "dashboard" / "static"


class Files(SimpleHTTPRequestHandler):
    def do_GET(self) -> None:
        name = urlsplit(self.path).path.removeprefix("/static/")
        if name not in WRITTEN:
            super().do_GET()
            return
        self.send_response(200)
        self.send_header("Content-Type", TYPES[PurePosixPath(name).suffix])
        self.end_headers()
        self.wfile.write(WRITTEN[name]().encode())

    def translate_path(self, path: str) -> str:
        wanted = unquote(urlsplit(path).path)
        if wanted.startswith("/static/"):
            return str(STATIC / wanted.removeprefix("/static/"))
        return str(GALLERY / (wanted.lstrip("/") or "index.html"))

    def end_headers(self) -> None:
        self.send_header("Cache-Control", "no-store")
        super().end_headers()

    def log_message(self, *_: object) -> None:
        """A test run is not the place for an access log."""


Files.extensions_map = {**SimpleHTTPRequestHandler.extensions_map, ".js": "text/javascript"}


@contextlib.contextmanager
def gallery_served(port: int = 0) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", port), Files)
    serving = threading.Thread(target=server.serve_forever, daemon=True)
    serving.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        serving.join(PATIENCE)


if __name__ == "__main__":
    with gallery_served(8731):
        threading.Event().wait()
