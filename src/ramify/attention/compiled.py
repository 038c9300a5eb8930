"""Numba kernels, kept on disk between processes where there is a place for them."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import njit

from ramify.attention import simd

logger = logging.getLogger(__name__)


def compiled(function: Callable[..., None], *sources: str) -> Any:
    """The kernel, compiled at its first call or read from what an earlier process compiled.

    Args:
        function: what is to be compiled; its name must be its own among all kernels.
        sources: the files of it and of what it calls, beside `simd`.

    Numba looks at the file of the function alone to see whether what it kept is stale, so the name
    that it keeps it under has the content of all of them in it.
    """
    content = b"".join(Path(one).read_bytes() for one in (*sources, simd.__file__, __file__))
    digest = hashlib.blake2b(content, digest_size=8).hexdigest()
    function.__qualname__ = f"{function.__name__.strip('_')}_{digest}_{simd.LANES}{'p' * simd.DOTS}"
    options = {"nogil": True, "parallel": True, "error_model": "numpy"}
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError as error:  # no directory that can be written to
        logger.info("kernels are compiled anew in every process: %s", error)
        return njit(**options)(function)
