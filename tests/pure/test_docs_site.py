"""The site of the documentation: every page is in its navigation, every link stays inside, nothing is fetched."""

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from docs_site import DOCS, HISTORY, NOT_SEARCHED, PROJECT_PAGES, Staging, faults
from notebook_page import notebook_markdown

CONFIG = tomllib.loads((DOCS / "zensical.toml").read_text(encoding="utf-8"))["project"]


def pages_of(nav: list[Any]) -> Iterator[str]:
    """Paths of the pages in a navigation, sections included."""
    for entry in nav:
        for target in entry.values():
            yield from [target] if isinstance(target, str) else pages_of(target)


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the site generator reads."""
    folder = tmp_path_factory.mktemp("site")
    Staging(folder).write()
    return folder


def test_the_navigation_has_every_page_and_no_other() -> None:
    """Each once; a notebook is there as the page that it becomes."""
    pages = [path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")]
    notebooks = [
        path.relative_to(DOCS).with_suffix(".md").as_posix() for path in DOCS.rglob("*.ipynb")
    ]
    project = [page for page in PROJECT_PAGES.values() if page.startswith("project/")]

    listed = list(pages_of(CONFIG["nav"]))

    assert sorted(listed) == sorted([*pages, *notebooks, *project])


def test_every_staged_link_leads_to_a_staged_file(staged: Path) -> None:
    """Also those that leave docs/ in the repository: to a file, a folder, the changelog."""
    lost = []
    num_links = 0

    for page in (staged / "pages").rglob("*.md"):
        text = re.sub(
            r"^ *(```+).*?^ *\1", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE
        )
        for target in re.findall(r"\]\(([^)\s#]+)(?:#[^)\s]*)?\)", text):
            if not re.match(r"[a-z]+:", target):
                num_links += 1
                if not (page.parent / target).is_file():
                    lost.append((page.name, target))

    assert num_links > 150
    assert lost == []


def test_history_is_not_searched(staged: Path) -> None:
    """Neither the lab notebook nor the changelog, nor texts of files; every other page is."""
    pages = staged / "pages"
    hidden = {
        page.relative_to(pages).as_posix()
        for page in pages.rglob("*.md")
        if page.read_text(encoding="utf-8").startswith(NOT_SEARCHED)
    }

    assert {page for page in hidden if not page.startswith("files/")} == set(HISTORY)
    assert "files/deploy/nginx.conf.md" in hidden


def test_lists_are_what_github_shows(staged: Path) -> None:
    """A list behind a paragraph is preceded by an empty line; code is left as it is."""
    text = (staged / "pages" / "architecture.md").read_text(encoding="utf-8")

    assert "**An eviction policy**\n\n1. " in text
    assert "\n    - A gateway" in text
    assert "\n  - job_name: ramify" in (staged / "pages" / "server.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("html", "fault"),
    [
        (
            '<script src="https://example.com/a.js"></script>',
            "page.html loads https://example.com/a.js",
        ),
        (
            '<link rel="stylesheet" href="//example.com/a.css">',
            "page.html loads //example.com/a.css",
        ),
        ('<a href="lost.html#x">x</a>', "page.html links to lost.html#x, which does not exist"),
        ('<a href="https://example.com/">x</a><a href="#x">y</a><a href="page.html">z</a>', None),
    ],
)
def test_a_page_that_needs_another_site_is_an_error(
    tmp_path: Path, html: str, fault: str | None
) -> None:
    """Scripts, styles and lost links are named; links to other sites are links."""
    (tmp_path / "page.html").write_text(html, encoding="utf-8")

    assert list(faults(tmp_path)) == ([fault] if fault else [])


def test_a_notebook_becomes_a_page() -> None:
    """Texts, code, printed lines and drawings, in the order of the cells."""
    notebook = {
        "cells": [
            {"cell_type": "markdown", "source": ["# Title\n", "text"]},
            {
                "cell_type": "code",
                "source": "draw()",
                "outputs": [
                    {"output_type": "stream", "text": ["1\n", "2\n"]},
                    {"output_type": "display_data", "data": {"image/svg+xml": "<svg></svg>"}},
                    {"output_type": "execute_result", "data": {"text/plain": "3"}},
                ],
            },
        ]
    }

    assert notebook_markdown(json.dumps(notebook)) == (
        "# Title\ntext\n\n```python\ndraw()\n```\n\n```text\n1\n2\n```\n\n"
        "<figure>\n<svg></svg>\n</figure>\n\n```text\n3\n```\n"
    )
