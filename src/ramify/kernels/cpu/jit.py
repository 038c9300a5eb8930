"""Numba kernels, kept on disk between processes where there is a place for them."""

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
# `from ramify.kernels.cpu.m import ...` and `from ramify.kernels.cpu import m, n as o`, also in
# parentheses over several lines
_IMPORT = re.compile(
    r"^[ \t]*from ramify\.kernels\.cpu(?:\.(\w+) import|[ ]import (?:\(([^)]*)\)|(.*)))",
    re.MULTILINE,
)


jit = njit(nogil=True, error_model="numpy")


@jit
def data_address(array: Any) -> Any:
    """Signed: to Numba, what is unsigned in one branch and signed in another is a float."""
    return np.int64(array.ctypes.data)


def imported_kernel_modules(source: str) -> set[str]:
    """Names of the modules of this package that a Python source imports."""
    modules = set[str]()
    for module, in_parentheses, on_line in _IMPORT.findall(source):
        names = re.sub(r"#.*", "", in_parentheses or on_line).split(",")
        modules |= {module} if module else {name.split()[0] for name in names if name.strip()}
    return modules


def kernel_sources(path: Path) -> list[Path]:
    """The file, the modules of this package that it imports, itself or through others, and `simd`.

    Sorted. Imports are found by a regular expression, so that no module has to be parsed at start.
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
    """The kernel, compiled at its first call or read from what an earlier process compiled.

    Args:
        function: what is to be compiled; its name must be its own among all kernels.

    Numba looks at the file of the function alone to see whether what it kept is stale, so the name
    that it keeps it under has the content of all of `kernel_sources` in it.
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
    except RuntimeError as error:  # no directory that can be written to
        logger.info("kernels are compiled anew in every process: %s", error)
        return njit(**options)(function)
