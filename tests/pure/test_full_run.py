"""The table of the full run: its patterns name tests and files that exist, and it says what has changed."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import full_run as script
import pytest

from tests.full_run import TABLE, Part, matches, read_parts

ROOT = Path(__file__).resolve().parents[2]
_, PARTS = read_parts(TABLE.read_text(encoding="utf-8"))
PART = Part(tests=("tests/a.py::*",), quick=("*[float32]",), covers=("src/a/*", "b.py"))


def all_ids() -> list[str]:
    """`path::function` of every test."""
    return [
        f"{path.relative_to(ROOT).as_posix()}::{node.name}"
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]


IDS = all_ids()
FILES = [
    path.relative_to(ROOT).as_posix()
    for folder in ("src", "tests", "benchmarks", "scripts")
    for path in (ROOT / folder).rglob("*.py")
]


@pytest.mark.parametrize("name", PARTS)
def test_every_pattern_names_something(name: str) -> None:
    """A test that is renamed leaves no pattern behind, and neither does a file."""
    part = PARTS[name]
    functions = [pattern.split("[")[0].rstrip("*") for pattern in part.tests]

    unknown = [text for text in functions if not matches_any(f"{text}*", IDS)]
    unknown += [text for text in part.covers if not matches_any(text, FILES)]

    assert not unknown
    assert part.covers


def test_what_draws_fewer_examples_is_covered() -> None:
    """Some package that such a test imports is among the files of the random examples."""
    part = PARTS["random examples"]
    uncovered = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        packages = re.findall(r"^from ramify\.(\w+)", text, re.MULTILINE)
        files = [f"src/ramify/{package}/__init__.py" for package in packages]
        files = [file for file in files if file in FILES]
        if "from tests.budget import" in text and files and not part.num_covered(files):
            uncovered.append(path.relative_to(ROOT).as_posix())

    assert not uncovered


def matches_any(pattern: str, texts: list[str]) -> bool:
    return any(matches(text, (pattern,)) for text in texts)


def test_a_part_has_what_its_patterns_say() -> None:
    """Only * stands for something else: brackets of a test's id are brackets."""
    assert PART.has("tests/a.py::test_x[bfloat16]")
    assert not PART.has("tests/a.py::test_x[float32]")
    assert not PART.has("tests/b.py::test_x[bfloat16]")
    assert PART.num_covered(["src/a/c.py", "src/b/c.py", "b.py"]) == 2


def test_what_has_changed_since_the_full_run_is_named() -> None:
    """By the parts that cover it; a commit that is missing is said to be missing."""
    parts = {"a": PART, "b": Part((), (), ("docs/*",))}

    assert "not been recorded" in script.report("", parts, None)
    assert "not in this clone" in script.report("0" * 40, parts, None)
    assert "no file that it covers" in script.report("0" * 40, parts, ["README.md"])
    assert script.report("0" * 40, parts, ["src/a/c.py"]).splitlines()[1:] == ["  a (1 files)"]


def test_this_suite_is_without_what_only_a_full_run_has(request: pytest.FixtureRequest) -> None:
    """What the parts have is deselected, unless -m asks for it."""
    if request.config.getoption("markexpr") != "not slow":
        pytest.skip("a run with -m of its own")

    ids = [item.nodeid for item in request.session.items]

    assert not [test_id for test_id in ids if any(part.has(test_id) for part in PARTS.values())]
