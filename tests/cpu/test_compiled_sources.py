"""The name of a kernel in the cache on disk changes with every source that is compiled into it."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import ramify

pytest.importorskip("numba", reason="the kernels need the extra ramify[cpu]")

from ramify.kernels.cpu import jit

ROOT = Path(ramify.__file__).parent
ENTRIES = {
    "op_list": "run_ops",
    "fused_layers": "run_fused_layers",
    "paged_attention": "paged_attention",
    "round_weights": "round_groups",
}


def imported_files(path: Path) -> set[Path]:
    """Files of Ramify that a file imports by any kind of import statement, by its syntax tree."""
    package = ["ramify", *path.relative_to(ROOT).parts[:-1]]
    names = set[str]()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = package[: len(package) + 1 - node.level] if node.level else []
            base = ".".join([*parents, *filter(None, [node.module])])
            names |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    modules = [name.split(".") for name in names if name.startswith("ramify.")]
    files = {ROOT.joinpath(*parts[1:]).with_suffix(".py") for parts in modules}
    return {file for file in files if file.exists()}


def closure(path: Path) -> set[Path]:
    """The file, and what it imports, itself or through others."""
    files, pending = set[Path](), {path}
    while pending:
        files |= pending
        pending = set[Path]().union(*map(imported_files, pending)) - files
    return files


def compiled_entries() -> Iterator[tuple[str, str]]:
    """Modules that call `compile_cached`, and the names that they give to the results."""
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                called, target = node.value.func, node.targets[0]
                if ast.unparse(called).endswith("compile_cached"):
                    yield (
                        ".".join(path.relative_to(ROOT).with_suffix("").parts),
                        ast.unparse(target),
                    )


def test_every_compiled_entry_is_known() -> None:
    assert dict(compiled_entries()) == {f"kernels.cpu.{key}": ENTRIES[key] for key in ENTRIES}


@pytest.mark.parametrize("module", ENTRIES)
def test_the_sources_of_an_entry_are_all_that_it_imports(module: str) -> None:
    """Found by a regular expression there, by the syntax tree here: file by file, and in all."""
    kernels = ROOT / "kernels" / "cpu"
    path = kernels / f"{module}.py"

    for file in closure(path):
        names = jit.imported_kernel_modules(file.read_text(encoding="utf-8"))
        assert {kernels / f"{name}.py" for name in names} == imported_files(file), file
    assert set(jit.kernel_sources(path)) == closure(path) | {
        kernels / "jit.py",
        kernels / "simd.py",
    }


@pytest.mark.parametrize("module", ENTRIES)
def test_any_change_of_a_source_changes_the_name(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name is the function's, a digest of the sources, and what the processor has."""
    function = getattr(
        importlib.import_module(f"ramify.kernels.cpu.{module}"), ENTRIES[module]
    ).py_func
    sources = jit.kernel_sources(ROOT / "kernels" / "cpu" / f"{module}.py")
    name, read = function.__qualname__, Path.read_bytes
    names = {name}
    try:
        jit.compile_cached(function)
        assert function.__qualname__ == name
        assert name.startswith(f"{ENTRIES[module]}_")
        for changed in sources:
            monkeypatch.setattr(
                Path,
                "read_bytes",
                lambda path, changed=changed: read(path) + b"#" * (path == changed),
            )
            jit.compile_cached(function)
            names.add(function.__qualname__)
    finally:
        function.__qualname__ = name
    assert len(names) == 1 + len(sources)


@pytest.mark.parametrize(
    ("source", "modules"),
    [
        ("from ramify.kernels.cpu.simd import LANES, load", {"simd"}),
        ("from ramify.kernels.cpu.simd import (\n    LANES,\n    load,\n)", {"simd"}),
        ("from ramify.kernels.cpu import simd, jit as compiler  # why", {"simd", "jit"}),
        ("from ramify.kernels.cpu import (\n    simd,  # a, b\n    jit,\n)", {"simd", "jit"}),
        ("def late():\n    from ramify.kernels.cpu import simd", {"simd"}),
        ("# from ramify.kernels.cpu import simd\nfrom ramify.kernels.cpu_other import x", set()),
    ],
)
def test_imports_in_a_source(source: str, modules: set[str]) -> None:
    assert jit.imported_kernel_modules(source) == modules
