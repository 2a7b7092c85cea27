# SPDX-License-Identifier: Apache-2.0
"""The documentation site: it builds offline, every page is in its navigation, and every link leads somewhere."""

import pytest

from documentation import links, site
from support.paths import ROOT


def test_links_of_all_pages_in_the_repository_lead_somewhere():
    assert links.broken_in_sources(ROOT) == []


def test_every_page_is_in_the_navigation():
    listed = site.navigation_pages()
    assert len(listed) == len(set(listed))
    pages = {str(site.Staging(ROOT).place_of(page)) for page in site.DOCS.rglob("*.md")}
    assert pages - set(listed) == set()
    assert {page for page in listed if not page.startswith("reference/")} <= pages


@pytest.mark.thorough
def test_site_builds_without_broken_links_and_loads_nothing_from_elsewhere():
    pytest.importorskip("zensical")
    pytest.importorskip("flwr")
    assert site.build() == []
    assert links.broken_in_site(site.SITE) == []
    assert len([*site.SITE.rglob("*.html")]) > 50
    monitor = (site.SITE / "reference" / "monitor.html").read_text(encoding="utf-8")
    assert "fv.Monitor.client" in monitor


PAGE = """# A page

[right](other.md#second-part), [no file](missing.md), [no heading](other.md#third), [out](../../outside.md)
`[code](not-a-link.md)`

```text
[code](not-a-link.md)
```
"""


def test_broken_links_of_markdown_are_named_with_their_line(tmp_path):
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "page.md").write_text(PAGE, encoding="utf-8")
    (docs / "other.md").write_text("# Other\n\n## Second part\n", encoding="utf-8")
    assert links.broken_in_sources(tmp_path) == [
        "docs/page.md:3: missing.md does not exist",
        "docs/page.md:3: other.md#third: there is no such heading",
        "docs/page.md:3: ../../outside.md leads out of the repository",
    ]


HTML = """<html><head><link rel="stylesheet" href="https://fonts.example.org/a.css">
<script src="//cdn.example.org/x.js"></script></head><body id="top"><a href="#top">up</a><a href="https://example.org">elsewhere</a>
<a href="none.html">none</a>
<a href="#absent">absent</a><img src="data:image/png;base64,AA=="></body></html>"""


def test_foreign_resources_and_broken_links_of_a_site_are_named(tmp_path):
    (tmp_path / "index.html").write_text(HTML, encoding="utf-8")
    (tmp_path / "style.css").write_text("@import 'https://example.org/b.css';", encoding="utf-8")
    assert sorted(links.broken_in_site(tmp_path)) == [
        "index.html: #absent: there is no such anchor",
        "index.html: loads //cdn.example.org/x.js",
        "index.html: loads https://fonts.example.org/a.css",
        "index.html: none.html does not exist",
        "style.css: loads https://example.org/b.css",
    ]
