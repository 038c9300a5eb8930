"""Numba compilation: `jit` for functions inside kernels, `compile_cached` for entry points."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler

from ramify.kernels.cpu import simd
from ramify.kernels.cpu.object_code import KernelCache

_DIRECTORY = Path(__file__).parent
# `from ramify.kernels.cpu.m import ...` and `from ramify.kernels.cpu import m, n as o`, the latter
# also over several lines in parentheses
_IMPORT = re.compile(
    r"^[ \t]*from ramify\.kernels\.cpu(?:\.(\w+) import|[ ]import (?:\(([^)]*)\)|(.*)))",
    re.MULTILINE,
)


class _NoEnvironments:
    """In place of the code generator of a `_LinkedLibrary`, which has no address to set one at."""

    def set_env(self, name: str, environment: object) -> None:
        """Do nothing: no function inside kernels uses objects of Python."""


class _LinkedLibrary(JITCodeLibrary):
    """Code of a function inside kernels: LLVM IR that is linked into entry points.

    Numba would optimise every function together with all that it calls, and compile it to machine
    code, at each level of calls anew. Here only the entry point is, as a whole.
    """

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:  # noqa: ARG002 - the interface of Numba
        """Return a null pointer: there is no machine code."""
        self._ensure_finalized()
        return 0

    @property
    def codegen(self) -> Any:
        return _NoEnvironments()


class _LinkingCompiler(Compiler):
    """Compiles a function inside kernels into a `_LinkedLibrary`."""

    def define_pipelines(self) -> Any:
        codegen, name = self.state.targetctx.codegen(), self.state.func_id.func_qualname
        self.state.library = _LinkedLibrary(codegen, name)
        return super().define_pipelines()


_OPTIONS = {"nogil": True, "error_model": "numpy"}
_INNER = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "pipeline_class": _LinkingCompiler}
# For functions that kernels call; Python cannot call them.
jit = njit(**_OPTIONS, **_INNER)
parallel_jit = njit(**_OPTIONS, **_INNER, parallel=True)


@jit
def data_address(array: Any) -> Any:
    """Address of an array, signed: Numba unifies signed and unsigned integers to float64."""
    return np.int64(array.ctypes.data)


def imported_kernel_modules(source: str) -> set[str]:
    """Names of the modules of this package that Python source text imports."""
    modules = set[str]()
    for module, parenthesized, rest_of_line in _IMPORT.findall(source):
        names = re.sub(r"#.*", "", parenthesized or rest_of_line).split(",")
        modules |= {module} if module else {name.split()[0] for name in names if name.strip()}
    return modules


def kernel_sources(path: Path) -> list[Path]:
    """Files that a kernel is compiled from: `path`, what it imports of this package, `jit` and `simd`.

    Imports are followed through all modules, by a regular expression: parsing would slow down the
    start. Sorted.
    """
    sources, pending = set[Path](), [path, Path(__file__), Path(simd.__file__)]
    while pending:
        source = pending.pop()
        if source not in sources:
            sources.add(source)
            names = imported_kernel_modules(source.read_text(encoding="utf-8"))
            pending += [_DIRECTORY / f"{name}.py" for name in names]
    return sorted(sources)


def compile_cached(function: Callable[..., None]) -> Any:
    """An entry point: loaded at its first call from what is shipped or kept on disk, else compiled.

    Args:
        function: its name must be unique among all entry points.

    Numba invalidates its cache by the file of the function alone. So the name that it caches under
    gets a digest of all `kernel_sources`, and the instruction set.
    """
    sources = kernel_sources(Path(inspect.getfile(function)))
    content = b"".join(source.read_bytes() for source in sources)
    digest = hashlib.blake2b(content, digest_size=8).hexdigest()
    function.__qualname__ = (
        f"{function.__name__.strip('_')}_{digest}_{simd.LANES}{'p' * simd.HAS_BF16_DOT}"
    )
    dispatcher = njit(**_OPTIONS)(function)
    dispatcher._cache = KernelCache(dispatcher, _num_missing)  # noqa: SLF001 - as `cache=True` does
    return dispatcher


def _num_missing(signature: Any) -> int:
    # By name: the table is no source of a kernel.
    table = importlib.import_module("ramify.kernels.cpu.entry_points")
    count: int = table.num_missing(signature)
    return count
