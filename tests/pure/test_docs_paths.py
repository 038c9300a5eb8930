"""Files, pages and members of classes that the documentation names are there."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "ramify"
ARCHITECTURE = ROOT / "docs" / "architecture.md"
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")], key=lambda page: page.as_posix()
)
MAX_README_WORDS = 1200


def name_of(page: Path) -> str:
    """A page's path in the repository."""
    return page.relative_to(ROOT).as_posix()


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_architecture_page_names_files_that_exist() -> None:
    """Every `path.py` in code font is below src/ramify, or below the repository for tests."""
    text = ARCHITECTURE.read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w/.]+\.py)`", text))

    missing = {
        name for name in named if not (SOURCE / name).is_file() and not (ROOT / name).is_file()
    }

    assert len(named) > 50
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_page_names_tests_that_exist(page: Path) -> None:
    """Each `tests/….py` in code font is there; the notebook and the changelog tell of former ones."""
    if page.name in ("log.md", "CHANGELOG.md"):
        pytest.skip("history")
    named = re.findall(r"(?:^|[ `\"(])(tests/[\w/.*]+\.py)", page.read_text(encoding="utf-8"))

    assert [name for name in named if not list(ROOT.glob(name))] == []


def members(node: ast.ClassDef) -> set[str]:
    """Methods, fields and attributes of a class that its own body defines or assigns."""
    names = set()
    for child in ast.walk(node):
        match child:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.add(name)
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                names.add(name)
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
    return names


def test_the_architecture_page_names_members_that_exist() -> None:
    """Every `Class.member` in code font, if the class is one of ours."""
    named = set(re.findall(r"`([A-Z]\w+)\.(\w+)", ARCHITECTURE.read_text(encoding="utf-8")))
    classes: dict[str, set[str]] = {}
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, set()).update(members(node))

    missing = {
        f"{owner}.{name}"
        for owner, name in named
        if owner in classes and name not in classes[owner]
    }

    assert len(named & {(owner, name) for owner in classes for name in classes[owner]}) > 20
    assert not missing


def test_the_architecture_page_names_every_package() -> None:
    """Each top-level package of the library stands in the table of layers."""
    text = ARCHITECTURE.read_text(encoding="utf-8")
    packages = {path.parent.name for path in SOURCE.glob("*/__init__.py")}

    missing = {name for name in packages if f"`{name}`" not in text and f"`{name}/" not in text}

    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    """Every relative link of every page."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    lost = []

    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        target, _, anchor = link.partition("#")
        file = (page.parent / target) if target else page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            lost.append(link)

    assert not lost


def test_the_readme_is_short() -> None:
    """A newcomer reads it in a few minutes."""
    words = (ROOT / "README.md").read_text(encoding="utf-8").split()

    assert len(words) <= MAX_README_WORDS
