"""Several products and turns in one call of compiled code."""

from __future__ import annotations

from typing import Any

from ramify.attention import row_ops
from ramify.attention.compiled import compiled
from ramify.models import panel_kernels, panel_tiles, row_kernels, row_tiles
from ramify.models.panel_kernels import multiply
from ramify.models.row_kernels import turn

MULTIPLY, TURN = range(2)
KIND = 17  # the place of one of them, behind the numbers of `multiply`
WIDTH = KIND + 1
_KIND, _TURN = KIND, TURN  # globals are constants to Numba


def _run_all(program: Any, eps: Any, positions: Any, scratch: Any, counter: Any) -> None:
    """One after the other; each is cut into tasks for all workers.

    Args:
        program: [n, WIDTH] int64: the numbers of `panel_kernels.multiply` or `row_kernels.turn`,
            with which of them it is at `KIND`.
        eps: [n] float64.
        positions, scratch, counter: as there.
    """
    for i in range(len(program)):
        if program[i, _KIND] == _TURN:
            turn(program[i], eps[i], positions)
        else:
            multiply(program[i], eps[i], scratch, counter)


run_all = compiled(
    _run_all,
    __file__,
    panel_kernels.__file__,
    panel_tiles.__file__,
    row_kernels.__file__,
    row_tiles.__file__,
    row_ops.__file__,
    parallel=False,
)
