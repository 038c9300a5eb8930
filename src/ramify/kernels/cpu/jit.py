"""Numba compilation: `jit` for functions inside kernels, `compile_cached` for entry points."""

from __future__ import annotations

import hashlib
import inspect
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit

from ramify.kernels.cpu import simd

logger = logging.getLogger(__name__)

_DIRECTORY = Path(__file__).parent
# `from ramify.kernels.cpu.m import ...` and `from ramify.kernels.cpu import m, n as o`, the latter
# also over several lines in parentheses
_IMPORT = re.compile(
    r"^[ \t]*from ramify\.kernels\.cpu(?:\.(\w+) import|[ ]import (?:\(([^)]*)\)|(.*)))",
    re.MULTILINE,
)


jit = njit(nogil=True, error_model="numpy")


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
    """An entry point, compiled at its first call or loaded from the cache on disk.

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
    options = {"nogil": True, "parallel": True, "error_model": "numpy"}
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError as error:  # no writable cache directory
        logger.info("kernels are compiled anew in every process: %s", error)
        return njit(**options)(function)
