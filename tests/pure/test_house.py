"""The house rules that neither ruff, mypy nor import-linter can decide."""

import ast
import graphlib
import re
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "ramify"
CODE = ("src", "tests", "scripts", "benchmarks", "examples")
MAX_LINES = 500  # 400 is the aim

# What runs without tensors, and must not even load them on the side.
DECISIONS = (
    "ramify",
    "ramify.errors",
    "ramify.outputs",
    "ramify.params",
    "ramify.config",
    "ramify.cache",
    "ramify.kv.block_table",
    "ramify.kv.stores.memory",
    "ramify.attention.planner",
    "ramify.engine.request",
    "ramify.engine.scheduling.scheduler",
    "ramify.engine.step",
    "ramify.engine.core",
    "ramify.engine.llm",
    "ramify.engine.async_llm",
)
VAGUE_VARIABLES = frozenset({"one", "each", "told", "found", "asked"})
CORE_MAY_IMPORT = frozenset({"ramify.cache", "ramify.params", "ramify.outputs", "ramify.errors"})


def python_files(*folders: str) -> Iterator[Path]:
    """Every Python file below these folders of the repository."""
    for folder in folders:
        yield from sorted((ROOT / folder).rglob("*.py"))


def text_files() -> Iterator[Path]:
    """Every Python file, every page of docs/, and the README, build and CI files."""
    yield from python_files(*CODE)
    yield from sorted((ROOT / "docs").rglob("*.md"))
    for name in ("README.md", "Makefile", "pyproject.toml", "constraints.txt", ".ci/run"):
        yield ROOT / name


def relative(path: Path) -> str:
    """The path relative to the repository root, with forward slashes."""
    return path.relative_to(ROOT).as_posix()


def imported_modules(path: Path) -> Iterator[str]:
    """Dotted names that a file imports anywhere, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{relative(path)}: relative import"
            yield node.module or ""


def imported_files(path: Path, modules: Collection[str]) -> Iterator[str]:
    """The modules whose names a file imports: `package.name` where that is a module itself."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                yield submodule if submodule in modules else node.module


def test_no_file_is_longer_than_one_idea() -> None:
    """A Python file has at most 500 lines."""
    lengths = {relative(path): len(path.read_bytes().splitlines()) for path in python_files(*CODE)}

    too_long = {name: length for name, length in lengths.items() if length > MAX_LINES}

    assert not too_long, f"split by idea, not by length: {too_long}"


def test_import_graph_is_acyclic() -> None:
    """The imports between Ramify's modules have no cycle, even under TYPE_CHECKING."""
    modules = {
        ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(
            ".__init__"
        ): path
        for path in python_files("src")
    }
    graph = {
        module: set(imported_files(path, modules)) & set(modules) - {module}
        for module, path in modules.items()
    }

    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" -> ".join(reversed(error.args[1])))


def test_names_say_what_they_own() -> None:
    """No module is called utils, no class ends in Manager or Helper, no variable is a mere `found`."""
    vague = []

    for path in python_files(*CODE):
        if path.stem.strip("_") in {"util", "utils", "helpers"}:
            vague.append(relative(path))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and node.name.endswith(("Manager", "Helper")):
                vague.append(f"{relative(path)}: {node.name}")
            # `asked` is a public field of two errors.
            if variable_of(node) in VAGUE_VARIABLES and path != SOURCE / "errors.py":
                vague.append(f"{relative(path)}: {variable_of(node)}")

    assert not vague, f"name what it owns or holds: {vague}"


def variable_of(node: ast.AST) -> str | None:
    """The variable or parameter that a node binds, or the function that it defines."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return node.id
    if isinstance(node, ast.arg):
        return node.arg
    return node.name if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else None


def test_reading_lists_name_modules_that_exist() -> None:
    """A package docstring lists `- `module`: ...` for modules of the package only."""
    stale = [
        f"{relative(path)}: {name}"
        for path in SOURCE.rglob("__init__.py")
        for head in re.findall(r"^- (`[^:\n]*):", path.read_text(encoding="utf-8"), re.MULTILINE)
        for name in re.findall(r"`(\w+)/?`", head)
        if not (path.parent / f"{name}.py").exists() and not (path.parent / name).is_dir()
    ]

    assert not stale


def test_no_path_of_one_machine_is_in_the_project() -> None:
    """No text file contains a path that exists on only one machine."""
    machine_paths = ("/" + "work/", "/" + "tmp/w")

    matches = [
        f"{relative(path)}: {machine_path}"
        for path in text_files()
        if path.exists()
        for machine_path in machine_paths
        if machine_path in path.read_text(encoding="utf-8")
    ]

    assert not matches


@pytest.mark.parametrize("module", DECISIONS)
def test_decisions_load_no_tensors(module: str) -> None:
    """Importing a module of DECISIONS loads no torch, transformers or safetensors."""
    code = (
        f"import sys, {module}\n"
        "print(*sorted({'torch', 'transformers', 'safetensors'} & set(sys.modules)))"
    )

    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )

    assert loaded.returncode == 0, loaded.stderr
    assert loaded.stdout.split() == []


def test_the_core_needs_the_standard_library_only() -> None:
    """ramify.cache imports only the standard library and the modules of CORE_MAY_IMPORT."""
    foreign = {
        f"{relative(path)}: {name}"
        for path in sorted((SOURCE / "cache").rglob("*.py"))
        for name in imported_modules(path)
        if name.split(".")[0] not in sys.stdlib_module_names
        and ".".join(name.split(".")[:2]) not in CORE_MAY_IMPORT
    }

    assert not foreign


def test_pure_tests_are_pure() -> None:
    """No file in tests/pure imports torch, transformers, safetensors or tokenizers."""
    heavy = {"torch", "transformers", "safetensors", "tokenizers"}

    impure = {
        f"{relative(path)}: {name}"
        for path in python_files("tests/pure")
        for name in imported_modules(path)
        if name.split(".")[0] in heavy
    }

    assert not impure
