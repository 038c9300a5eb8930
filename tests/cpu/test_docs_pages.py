"""The Python of every page runs: of these pages here, of the others in a test of their own."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ramify import LLM
from tests.page_code import run_python
from tests.pure.live_server import live
from tests.pure.test_docs import blocks

ROOT = Path(__file__).resolve().parents[2]
# Page, or folder of pages → the test that runs its blocks.
ELSEWHERE = {
    "docs/building-blocks.md": "tests/cpu/test_docs.py",
    "docs/cache-reference.md": "tests/pure/test_docs.py",
    "docs/concepts": "tests/cpu/test_concepts.py",
    "docs/engine.md": "tests/cpu/test_engine_guide.py",
    "docs/own-engine.md": "tests/pure/test_docs.py",
    "docs/planner-and-attention.md": "tests/cpu/test_planner_docs.py",
    "docs/server.md": "tests/pure/test_server_docs.py",
    "docs/simulate.md": "tests/pure/analysis/test_simulate_docs.py",
    "docs/tutorials": "tests/e2e/test_tutorials.py",
}
NOT_RUN = {"docs/clients.md": "packages that `make clients` installs"}
CLIENTS = ("anthropic", "ollama", "openai")  # of the extra `dev`
SERVER = re.compile(r"http://127\.0\.0\.1:(\d+)")
# Its model, and its port.
SERVE = re.compile(r"^ramify serve ([a-z][\w-]*)(?:.*? --port (\d+))?", re.MULTILINE)
# What a page leaves to its reader.
STAND_INS = {
    'llm = LLM("path/to/checkpoint",': 'from ramify import LLM\nllm = LLM("ramify-tiny",',
    "llm = LLM(model,": 'from ramify import LLM\nllm = LLM("ramify-tiny",',
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


def runner_of(page: str) -> str | None:
    """Path of the test that runs a page's blocks, if it is another one."""
    return ELSEWHERE.get(page, ELSEWHERE.get(Path(page).parent.as_posix()))


PAGES = [page for page in pages_with_python() if not runner_of(page) and page not in NOT_RUN]


@contextlib.contextmanager
def stand_ins_for(text: str) -> Iterator[dict[str, str]]:
    """What stands for texts of a page: a running server, of its model, for that of its commands."""
    replaced = {name: value for name, value in STAND_INS.items() if name in text}
    addresses = {
        match[0]: match[1] for code in blocks(text, "python") for match in SERVER.finditer(code)
    }
    if not addresses:
        yield replaced
        return
    options: dict[str, Any] = {"batch_dir": Path.cwd() / "batches"} if "--batch-dir" in text else {}
    served = SERVE.search(text)
    model, port = served.groups() if served else ("ramify-tiny", None)
    assert set(addresses.values()) == {port or "8000"}
    with live(model=model, **options) as server:
        yield replaced | dict.fromkeys(addresses, server.url)


@pytest.mark.parametrize("page", PAGES)
def test_every_block_of_python_runs(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In order, in one namespace and an empty folder; they print what the page shows, if it does."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for client in CLIENTS:
        if f"import {client}\n" in text:
            pytest.importorskip(client)
    monkeypatch.chdir(tmp_path)

    with stand_ins_for(text) as replaced:
        names = run_python(text, page, replaced)

    for value in list(names.values()):
        if isinstance(value, LLM):
            value.close()
        counts = getattr(value, "request_counts", None)  # of a batch
        assert not (getattr(counts, "failed", 0) or getattr(counts, "errored", 0))


@pytest.mark.parametrize("page", [page for page in pages_with_python() if runner_of(page)])
def test_the_test_of_a_page_reads_it(page: str) -> None:
    """The table names tests that have the page's name, or that of its folder."""
    file = ROOT / str(runner_of(page))
    name = Path(page).stem if page in ELSEWHERE else Path(page).parent.name

    assert re.search(rf"\b{name}\b", file.read_text(encoding="utf-8"))
