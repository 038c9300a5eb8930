"""What a kernel is kept under on disk has the content of all that is compiled into it."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import ramify

pytest.importorskip("numba", reason="the kernels need the extra ramify[cpu]")

ROOT = Path(ramify.__file__).parent
KNOWN = {"ramify.attention.simd", "ramify.attention.compiled"}  # part of every name


def imported(module: str) -> set[str]:
    """Modules of Ramify that a module imports, itself or through others."""
    found, rest = set[str](), [module]
    while rest:
        path = ROOT.parent / f"{rest.pop().replace('.', '/')}.py"
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom) or not str(node.module).startswith("ramify"):
                continue
            names = [f"{node.module}.{one.name}" for one in node.names] + [str(node.module)]
            new = {one for one in names if (ROOT.parent / f"{one.replace('.', '/')}.py").exists()}
            rest += new - found
            found |= new
    return found - {module} - KNOWN


def kernels() -> Iterator[tuple[str, set[str]]]:
    """Modules that compile a kernel, and the modules whose files they name for it."""
    for path in sorted(ROOT.rglob("*_kernels.py")):
        module = ".".join(path.relative_to(ROOT.parent).with_suffix("").parts)
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "compiled":
                named = [one for one in call.args if isinstance(one, ast.Attribute)]
                yield module, {ast.unparse(one.value) for one in named}


def test_every_module_that_is_compiled_in_is_named() -> None:
    found = dict(kernels())
    assert {"ramify.attention.block_kernels", "ramify.models.layer_kernels"} <= found.keys()
    for module, named in found.items():
        loaded = importlib.import_module(module)
        files = {getattr(loaded, one).__name__ for one in named}
        assert imported(module) <= files, f"{module} does not name all that it is made of"
