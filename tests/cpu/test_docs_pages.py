"""The Python of every page runs: of these pages here, of the others in a test of their own."""

import contextlib
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ramify import LLM, SamplingParams
from tests.pure.live_server import live
from tests.pure.test_docs import blocks

ROOT = Path(__file__).resolve().parents[2]
# Page → the test that runs its blocks, or the reason why none does.
ELSEWHERE = {
    "docs/building-blocks.md": "tests/cpu/test_docs.py",
    "docs/cache-reference.md": "tests/pure/test_docs.py",
    "docs/engine.md": "tests/cpu/test_engine_guide.py",
    "docs/own-engine.md": "tests/pure/test_docs.py",
    "docs/planner-and-attention.md": "tests/cpu/test_planner_docs.py",
    "docs/server.md": "tests/pure/test_server_docs.py",
    "docs/simulate.md": "tests/pure/analysis/test_simulate_docs.py",
}
NOT_RUN = {"docs/clients.md": "packages that `make clients` installs"}
SERVER = "http://127.0.0.1:8000"
# What a page leaves to its reader: `MODEL` names none that is here.
STAND_INS = {
    '"path/to/checkpoint"': '"ramify-tiny"',
    "LLM(model,": 'LLM("ramify-tiny",',
    '"/var/cache/ramify"': '"cache"',
}


def pages_with_python() -> list[str]:
    """Paths of the README and of the pages of docs/ that have a block of Python."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [
        page.relative_to(ROOT).as_posix()
        for page in pages
        if blocks(page.read_text(encoding="utf-8"), "python")
    ]


PAGES = [page for page in pages_with_python() if page not in ELSEWHERE | NOT_RUN]


@contextlib.contextmanager
def server_for(code: str) -> Iterator[str]:
    """The code with the URL of a running server in place of the usual one, if it calls one."""
    if SERVER not in code:
        yield code
        return
    with live(model="ramify-tiny") as server:
        yield code.replace(SERVER, server.url)


@pytest.mark.parametrize("page", PAGES)
def test_every_block_of_python_runs(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In order, in one namespace and an empty folder; they print what the page shows, if it does."""
    text = (ROOT / page).read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"LLM": LLM, "SamplingParams": SamplingParams}
    printed = io.StringIO()
    code = "\n".join(blocks(text, "python"))
    for name, value in STAND_INS.items():
        code = code.replace(name, value)

    with server_for(code) as here, contextlib.redirect_stdout(printed):
        exec(compile(here, page, "exec"), names)

    shown = "".join(blocks(text, "text"))
    if shown:
        assert printed.getvalue() == shown
    for value in list(names.values()):
        if isinstance(value, LLM):
            value.close()


@pytest.mark.parametrize("page", ELSEWHERE)
def test_the_test_of_a_page_reads_it(page: str) -> None:
    """The table names tests that have the page's name."""
    test = (ROOT / ELSEWHERE[page]).read_text(encoding="utf-8")

    assert re.search(rf"\b{Path(page).stem}\b", test)
    assert page in pages_with_python()
