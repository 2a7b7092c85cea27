# SPDX-License-Identifier: Apache-2.0
"""Serves the front end's files from memory, and announces to the browser what a page will need.

A page consists of some forty small modules. A browser learns of a module only when it has read the one that imports it:
without a word from us they would come in five or six waves, each as long as the server needs to look at a disk. So the
page itself names all that its view is made of.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from fedvitals import palette
from fedvitals.dashboard.asgi import HttpError, Request, Response, Route

STATIC = Path(__file__).with_name("static")
TYPES = {
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".html": "text/html; charset=utf-8",
}
# Written by the palette, not files of the folder.
WRITTEN = {"palette.css": palette.stylesheet, "palette.js": palette.javascript}
# With one more name behind it, a list becomes one of its entries: as in app.js.
ENTRIES = {"clients": "client", "rounds": "round", "findings": "finding"}
_IMPORT = re.compile(r"""^\s*(?:import|export)\b(?:[^"';]*?\bfrom)?\s*["'](\.[^"']+)["']""", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class File:
    """A file of the front end."""

    body: bytes
    type: str
    etag: str
    state: tuple[int, int]  # when it was changed, and its size
    imports: tuple[str, ...] = ()  # as they are written in it

    def answer(self, request: Request) -> Response:
        """Return the file, or 304 where the browser has it."""
        headers = {"ETag": self.etag, "Cache-Control": "no-cache"}
        if request.has_current(self.etag):
            return Response(status=304, headers=headers)
        return Response(self.body, media_type=self.type, headers=headers)


class Files:
    """All files of a folder, each read once, and again when it was changed. Nothing else can be asked for."""

    def __init__(self, folder: Path = STATIC, root: str = "") -> None:
        """`root`: the path in front of all addresses, as a proxy gives it, e.g. "/fedvitals"."""
        self._folder, self._root = folder, root
        self._files: dict[str, File] = {}
        self._pages: dict[str, File] = {}

    def get(self, name: str) -> File | None:
        """Return a file by its path in the folder; None where there is none, or where the path leads out of it."""
        kind = TYPES.get(PurePosixPath(name).suffix)
        if kind is None or PurePosixPath(name).is_absolute() or ".." in name or "\\" in name or "\x00" in name:
            return None
        if name in WRITTEN:
            if name not in self._files:
                self._files[name] = _file(WRITTEN[name]().encode(), kind, (0, 0))
            return self._files[name]
        path = self._folder / name
        try:
            status = path.stat()
            state = status.st_mtime_ns, status.st_size
            known = self._files.get(name)
            if known is None or known.state != state:
                known = self._files[name] = _file(self._addressed(path.read_bytes(), kind), kind, state)
        except OSError:
            return None
        return known

    def _addressed(self, body: bytes, kind: str) -> bytes:
        """A page with its own addresses below the root. Scripts find the root by their own address (root.js)."""
        return body.replace(b'"/static/', f'"{self._root}/static/'.encode()) if kind == TYPES[".html"] else body

    def page(self, view: str) -> File:
        """The one page of the dashboard, with the modules of a view announced."""
        index = self.get("index.html")
        assert index is not None  # noqa: S101 - it is a part of the package
        names = self.modules("app.js", f"views/{view}.js")
        known = self._pages.get(view)
        links = "".join(f'    <link rel="modulepreload" href="{self._root}/static/{name}">\n' for name in names)
        body = index.body.replace(b"  </head>", links.encode() + b"  </head>", 1)
        if known is None or known.body != body:
            known = self._pages[view] = _file(body, index.type, (0, len(body)))
        return known

    def modules(self, *names: str) -> list[str]:
        """Return these modules and all that they import, directly or not; without those of «import()»."""
        modules: dict[str, None] = {}
        todo = list(names)
        while todo:
            name = todo.pop(0)
            file = self.get(name)
            if file is None or name in modules:
                continue
            modules[name] = None
            folder = PurePosixPath(name).parent
            todo += [_plain(folder / target) for target in file.imports]
        return list(modules)


def _file(body: bytes, kind: str, state: tuple[int, int]) -> File:
    imports = tuple(_IMPORT.findall(body.decode())) if kind == TYPES[".js"] else ()
    return File(body, kind, f'"{hashlib.blake2b(body, digest_size=8).hexdigest()}"', state, imports)


def _plain(path: PurePosixPath) -> str:
    """Without «.» and «..»."""
    parts: list[str] = []
    for part in path.parts:
        if part == ".." and parts:
            parts.pop()
        elif part != ".":
            parts.append(part)
    return "/".join(parts)


def view_of(path: str) -> str:
    """Return the view that the page will show at an address."""
    parts = [part for part in path.split("/") if part]
    if not parts:
        return "runs"
    if parts[0] == "compare":
        return "compare"
    view = parts[2] if len(parts) > 2 else "overview"
    return ENTRIES.get(view, view) if len(parts) > 3 else view


def routes(root: str = "", *, last: bool = False) -> list[Route]:
    """Files and pages, with addresses below `root`; `last`: what no other route knows.

    Without threads: they are in memory, and a page asks for forty of them at once.
    """
    files = Files(root=root)

    def named(name: str = "") -> Callable[[Request], Awaitable[Response]]:
        """The route of a file; without a name, of the one that the address names."""

        async def serve(request: Request) -> Response:
            file = files.get(name or request.path_parameters["name"])
            if file is None:
                raise HttpError(404, "There is no such file.")
            return file.answer(request)

        return serve

    async def page(request: Request) -> Response:
        view = view_of(request.path)
        return files.page(view if re.fullmatch(r"[a-z]+", view) else "overview").answer(request)

    async def lost(request: Request) -> Response:
        """No such page, which the page itself says; who asks the API is told in its own shape."""
        if request.path.startswith("/api/"):
            raise HttpError(404, "There is nothing at this address.")
        response = files.page("runs").answer(request)
        response.status = 404
        return response

    if last:
        return [Route("/{path:path}", lost)]
    return [
        Route("/static/{name:path}", named()),
        Route("/favicon.ico", named("icon.svg")),
        Route("/login", named("login.html")),
        *(Route(path, page) for path in ("/", "/compare", "/runs/{path:path}")),
    ]
