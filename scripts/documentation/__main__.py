# SPDX-License-Identifier: Apache-2.0
"""`scripts/docs [--check | build | serve | notebooks]`: see there."""

from __future__ import annotations

import functools
import http.server
import sys

from documentation import links, pages, site


def write_pages() -> None:
    """Write the pages that come from code, where they have changed."""
    for path in pages.stale():
        (site.ROOT / path).write_text(pages.PAGES[path](), encoding="utf-8")
        print(f"wrote {path}")


def check() -> None:
    """Exit with 1 if a page is out of date or a link is broken."""
    problems = [f"{path}: out of date. Write it again with:  scripts/docs" for path in pages.stale()]
    problems += links.broken_in_sources(site.ROOT)
    if problems:
        sys.exit("\n".join(problems))
    print("all pages are up to date, and all links lead somewhere")


def build() -> None:
    """Build the site; exit with 1 if one of its links is broken or a page would load something from elsewhere."""
    problems = [*site.build(), *links.broken_in_site(site.SITE)]
    if problems:
        sys.exit("\n".join(problems))
    print(f"built {site.SITE / 'index.html'}")


def serve(port: int = 8000) -> None:
    """Build the site and serve it on this machine until Ctrl-C."""
    build()
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=site.SITE)
    with http.server.ThreadingHTTPServer(("127.0.0.1", port), handler) as server:
        print(f"http://127.0.0.1:{port}")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()


def renew_notebooks() -> None:
    """Run the notebooks of examples/notebooks and keep their new outputs."""
    from documentation import notebooks  # noqa: PLC0415 - needs Jupyter's packages

    notebooks.renew()


COMMANDS = {(): write_pages, ("--check",): check, ("build",): build, ("serve",): serve, ("notebooks",): renew_notebooks}

if __name__ == "__main__":
    command = COMMANDS.get(tuple(sys.argv[1:]))
    if command is None:
        sys.exit("usage: scripts/docs [--check | build | serve | notebooks]")
    command()
