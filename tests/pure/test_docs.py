"""The documentation of the cache core is true: its code runs, and it names every public name."""

import contextlib
import gc
import inspect
import io
import os
import re
import subprocess
import sys
import tracemalloc
from array import array
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

import ramify.cache
from ramify.cache import INDICES, POLICIES, CacheEvent, CacheKey, PrefixCache, RadixTree, Snapshot
from ramify.cache.ghosts import REASONS

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
GUIDE = (DOCS / "own-engine.md").read_text(encoding="utf-8")
REFERENCE = (DOCS / "cache-reference.md").read_text(encoding="utf-8")
PAGES = {"own-engine": GUIDE, "cache-reference": REFERENCE}
MAX_PROGRAM_LINES = 60  # fewer

# Says no to every import of a library that a cache core must do without.
GUARD = """
import runpy, sys
from importlib.abc import MetaPathFinder

class Refuse(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in {"torch", "numpy", "transformers"}:
            raise ImportError(f"{name} is not to be imported here")

sys.meta_path.insert(0, Refuse())
runpy.run_path(sys.argv[1], run_name="__main__")
assert not {"torch", "numpy", "transformers"} & set(sys.modules)
"""


def blocks(page: str, language: str) -> list[str]:
    """Return the fenced blocks of a page in `language`, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)


def section(heading: str) -> str:
    """Return a section of the reference, from its heading to the next heading."""
    match = re.search(
        rf"^#+ {re.escape(heading)}\n(.*?)(?=^#+ |\Z)", REFERENCE, re.DOTALL | re.MULTILINE
    )
    assert match, f"the reference has no section {heading!r}"
    return match[1]


def named(text: str) -> set[str]:
    """Return every identifier in code font."""
    return set(re.findall(r"\w+", " ".join(re.findall(r"`([^`\n]+)`", text))))


def public_names(kind: type) -> set[str]:
    """Return the public fields, methods and properties of a class."""
    names = {name for name in vars(kind) if not name.startswith("_")}
    if is_dataclass(kind):
        names |= {field.name for field in fields(kind)}
    return names


def signature(name: str, call: Any) -> str:
    """Format a call as the reference does: names and defaults, no types."""
    full = inspect.signature(call)
    shown = [
        parameter.replace(annotation=parameter.empty) for parameter in full.parameters.values()
    ]
    without_self = [parameter for parameter in shown if parameter.name != "self"]
    text = str(full.replace(parameters=without_self, return_annotation=full.empty))
    return name + re.sub(r"<built-in function (\w+)>", r"time.\1", text)


def rows(kind: str) -> dict[str, list[str]]:
    """Return the rows of a section's tables of calls: call → its other cells."""
    cells = [line.strip("|").split("|") for line in section(kind).splitlines() if line[:3] == "| `"]
    return {row[0].strip(): [cell.strip() for cell in row[1:]] for row in cells}


CALL_SECTIONS = (
    "Looking",
    "Leases",
    "Pages",
    "A prefix's way into the tree",
    "Pins and priorities",
    "Watching",
)


def call_rows() -> dict[str, list[str]]:
    """Return all calls of PrefixCache: call → result, raises, cost."""
    calls: dict[str, list[str]] = {}
    for heading in CALL_SECTIONS:  # "Pages" heads a class as well: the first one is meant
        calls |= rows(heading)
    return calls


CALLS = {name: member for name, member in vars(PrefixCache).items() if not name.startswith("_")}


# -- code ----------------------------------------------------------------------------------


def test_the_program_runs_without_torch_and_prints_what_the_page_says(tmp_path: Path) -> None:
    """The guide's program is short, needs only the standard library and prints what it shows."""
    program = blocks(GUIDE, "python")[0]
    file = tmp_path / "engine.py"
    file.write_text(program, encoding="utf-8")
    path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])

    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", GUARD, str(file)],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )

    assert run.returncode == 0, run.stderr
    assert run.stdout == blocks(GUIDE, "text")[0]
    assert len(program.splitlines()) < MAX_PROGRAM_LINES


def test_the_program_meets_everything_that_the_page_tells() -> None:
    """Requests share pages, a request restarts after running out, and all pages come back."""
    names: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(blocks(GUIDE, "python")[0], names)
    cache: PrefixCache = names["engine"].cache

    stats = cache.stats()

    cache.check()
    assert stats.lookups == len(names["prompts"]) + 1  # one had to begin again
    assert stats.hit_tokens > stats.lookup_tokens / 2
    assert (stats.private_pages, stats.num_leases) == (0, 0)
    assert stats.evictable_pages == stats.cached_pages


@pytest.mark.parametrize("page", PAGES)
def test_every_block_of_code_runs(page: str) -> None:
    """The code blocks of a page run in order in a shared namespace and leave no lease."""
    names: dict[str, Any] = {}

    with contextlib.redirect_stdout(io.StringIO()):
        for number, code in enumerate(blocks(PAGES[page], "python")):
            exec(compile(code, f"{page}, block {number}", "exec"), names)

    names["cache"].check()
    assert names["cache"].stats().num_leases == names["cache"].stats().private_pages == 0
    assert "mru" not in POLICIES


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    """Every link points to an existing page and heading."""
    lost = []

    for link in re.findall(r"\]\(([^)\s]+)\)", PAGES[page]):
        target, _, anchor = link.partition("#")
        text = (DOCS / target).read_text("utf-8") if target else PAGES[page]
        headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
        anchors = {
            re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings
        }
        if anchor and anchor not in anchors:
            lost.append(link)

    assert not lost


# -- the reference has every name ------------------------------------------------------------


def test_the_reference_has_every_public_name() -> None:
    """Each name of `ramify.cache.__all__` has a heading, except for the two tables."""
    headings = set(re.findall(r"^#+ (.+)$", REFERENCE, re.MULTILINE))
    tables = {"POLICIES", "INDICES"} & named(section("Tables"))

    missing = set(ramify.cache.__all__) - headings - tables

    assert not missing


@pytest.mark.parametrize("name", CALLS)
def test_the_reference_has_every_call_with_its_errors_and_its_cost(name: str) -> None:
    """Each call has a row with its arguments, defaults, documented errors and cost."""
    member = CALLS[name]
    call = name if isinstance(member, property) else signature(name, member)

    row = call_rows().get(f"`{call}`")

    assert row, f"no row for {call}"
    result, raises, cost = row
    assert result and cost
    docstring = inspect.getdoc(member) or ""
    errors = re.findall(r"^\s+(\w+Error):", docstring.partition("Raises:")[2], re.MULTILINE)
    assert set(errors) <= named(raises)


def test_the_reference_has_no_call_that_is_gone() -> None:
    """Every row of the PrefixCache tables names an existing call."""
    gone = [call for call in call_rows() if call.strip("`").partition("(")[0] not in CALLS]

    assert not gone


@pytest.mark.parametrize(
    "name",
    [name for name in ramify.cache.__all__ if isinstance(getattr(ramify.cache, name), type)],
)
def test_the_reference_has_every_member(name: str) -> None:
    """The reference names the public members of each public class except RadixTree."""
    kind = getattr(ramify.cache, name)
    wanted = set(CALLS) if kind is PrefixCache else public_names(kind)
    text = "".join(map(section, CALL_SECTIONS)) if kind is PrefixCache else last_section(name)

    missing = set() if kind is RadixTree else wanted - named(text)

    assert not missing


def last_section(heading: str) -> str:
    """Return the last section with this heading, which describes the class."""
    at = REFERENCE.rindex(f"\n### {heading}\n")
    return re.split(r"^#+ ", REFERENCE[at + 5 :], flags=re.MULTILINE)[0]


@pytest.mark.parametrize("kind", [PrefixCache, CacheKey, ramify.cache.PageLedger, RadixTree])
def test_constructors_are_as_the_reference_writes_them(kind: type) -> None:
    """The reference writes each constructor with its arguments, order and defaults."""
    assert f"`{signature(kind.__name__, kind)}`" in REFERENCE


def test_what_has_names_is_named() -> None:
    """The reference names all policies, indices, eviction and miss reasons, and event kinds."""
    explained = inspect.getdoc(ramify.cache.Explanation) or ""
    reasons = re.findall(r'^- "(\w+)"', explained, re.MULTILINE)
    kinds = re.findall(r'"(\w+)" \(', inspect.getdoc(CacheEvent) or "")

    missing = {*POLICIES, *INDICES, *REASONS, *reasons, *kinds} - named(REFERENCE)

    assert len(reasons) == 7 and len(kinds) == 4
    assert not missing
    assert {*POLICIES, *INDICES} <= named(GUIDE)
    assert public_names(Snapshot) <= named(last_section("Snapshot"))


# -- memory ----------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_columns_have_the_bytes_that_the_reference_says(policy: str) -> None:
    """The reference gives the bytes per node of all columns for each policy."""
    tree = PrefixCache(8, policy=policy)._store.tree

    row = next(line for line in section("Cost").splitlines() if "columns" in line)

    size = 8 * len(tree._columns)
    assert re.search(rf"\b{size} with [^;|]*`{policy}`", row), f"{size} bytes with {policy}"


@pytest.mark.parametrize(("index", "num_pages"), [("radix", 1), ("radix", 8), ("hash", 1)])
def test_nodes_have_the_bytes_that_the_reference_says(index: str, num_pages: int) -> None:
    """Memory per node, measured with tracemalloc, is within the reference's bounds."""
    page_size, num_nodes = 16, 2_000
    cache = PrefixCache(num_nodes * num_pages, page_size, index=index, log_every=0)
    bounds = re.search(rf"`{index}` and `auto`.*\*\*(\d+) to (\d+) \+ 4·S", section("Cost"))
    assert bounds
    gc.collect()
    tracemalloc.start()

    before = tracemalloc.get_traced_memory()[0]
    for number in range(num_nodes):
        key = CacheKey(array("i", [number]) * (page_size * num_pages))
        lease = cache.acquire(key)
        cache.release(cache.publish(lease, key, cache.reserve(num_pages)))
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - before
    for number in range(num_nodes):
        tokens = array("i", [number]) * (page_size * num_pages)
        cache.release(cache.acquire(CacheKey([*tokens, 0])))
    gc.collect()
    used_again = tracemalloc.get_traced_memory()[0] - before - grown
    tracemalloc.stop()

    assert cache.stats().num_nodes == num_nodes
    atoms = 4 * page_size * (1 + num_pages if index == "radix" else 1)
    # No page ids: they were in the list of free pages before.
    fixed = grown / num_nodes - atoms
    assert 0.9 * int(bounds[1]) <= fixed <= 1.15 * int(bounds[2])
    more = re.search(r"up to (\d+) more once it was used again", section("Cost"))
    assert more and used_again / num_nodes <= 1.05 * int(more[1])
