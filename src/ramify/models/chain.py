"""What a dense decoder computes from one attention to the next, in one call of compiled code.

In short steps attention too, if it is told how (`attention.inline`): all layers are one call.

For few rows the Python around a product takes as long as a small product: a pass over the weights
leaves nothing of the interpreter in the processor's caches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ramify.attention.tree import use_threads
from ramify.errors import ConfigError
from ramify.models.panels import KINDS, OUT, ROWS, Panels, Turn, X, kept_scratch
from ramify.models.rows import spoil

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ramify.attention.inline import Inline

    Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]  # see `dense`

# What one call computes at most: so many rows, or so many products of two numbers. By their peaks that
# is 0.3 s of two cores that multiply bfloat16 (Zen 4), 0.7 s of two with AVX2. Where a layer takes
# longer the interpreter around it costs nothing, and it should get its turn.
INLINE_ROWS, INLINE_WORK = 64, 6e10
MAX_PROGRAMS = 64  # kept, one for each number of rows and of threads: those used last


class Links(NamedTuple):
    """The operations of a layer, in order; attention comes after the second."""

    qkv: Panels
    turn: Turn
    output: Panels
    inner: Panels  # gate and up
    down: Panels

    @classmethod
    def of(cls, *operations: object) -> Links | None:
        """Those of a layer in this order, or None if one of them is no kernel of ours."""
        qkv, turn, *others = operations
        products = [one for one in (qkv, *others) if isinstance(one, Panels)]
        if len(products) < len(operations) - 1 or not isinstance(turn, Turn):
            return None
        return cls(products[0], turn, *products[1:])


_QKV, _TURN, _OUTPUT, _INNER, _DOWN = range(5)
_EACH = len(Links._fields)


class Chain:
    """All layers of a dense decoder; the bits are those of their operations one by one.

    Args:
        layers: at least one, all of the same widths and dtype.
        num_heads: of queries, of keys, of values.
        head_dim: of each of them.

    Raises:
        ConfigError: layers differ, or the widths of one do not fit.
    """

    def __init__(
        self, layers: Sequence[Links], *, num_heads: tuple[int, int, int], head_dim: int
    ) -> None:
        from ramify.models import chain_kernels, layer_kernels

        kinds = {tuple(link.kind for link in links) for links in layers}
        if len(kinds) != 1 or len({kind[0] for each in kinds for kind in each}) != 1:
            raise ConfigError(f"layers differ in their widths or dtypes: {sorted(map(str, kinds))}")
        first, heads = layers[0], sum(num_heads) * head_dim
        hidden, mixed, inner = first.qkv.widths[0], num_heads[0] * head_dim, first.down.widths[0]
        expected = (hidden, heads), (mixed, hidden), (hidden, inner), (inner, hidden)
        found = tuple(link.widths for link in first if isinstance(link, Panels))
        if found != expected:
            raise ConfigError(
                f"products have widths {found}; with these heads they must have {expected}"
            )
        self._kernels, self._run_layers = chain_kernels, layer_kernels.run_layers
        self._layers, self._num_heads, self._head_dim = list(layers), num_heads, head_dim
        self._eps = np.array([link.eps for links in layers for link in links])
        self._num_weights = len(layers) * sum(
            link.widths[0] * link.widths[1] * (1 + (link is first.inner))
            for link in first
            if isinstance(link, Panels)
        )
        # not of methods: they would keep themselves, and the weights, until cycles are collected
        kept = functools.lru_cache(MAX_PROGRAMS)
        self._program = kept(partial(_program, self._layers))
        self._floats = kept(partial(_scratch_floats, first))
        use_threads(torch.get_num_threads())  # Numba's pool starts with its first kernel
        nothing = np.zeros((0, chain_kernels.WIDTH), np.int64), self._eps[:0], np.zeros(0, np.int64)
        # compiled now, not in the first step
        chain_kernels.run_all(*nothing, 1, *kept_scratch(1, 0, 0))

    def run(self, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """See `DenseDecoder.forward`.

        Args:
            hidden: [T, hidden_size] of the layers' dtype, contiguous, T at least 1; it is written
                to, and becomes the result.

        Raises:
            ConfigError: shapes or dtypes disagree, or `attend` returned something that does not fit.
            IndexError: a position is outside the tables.
        """
        first = self._layers[0]
        first.qkv.check(hidden)
        first.turn.check_positions(positions, len(hidden))
        if not hidden.is_contiguous():
            raise ConfigError(f"hidden has strides {hidden.stride()}; it must be contiguous")
        program, _inner = self._addressed(hidden)
        rows: Tensor | None = getattr(attend, "rows", None)
        ahead = len(program) if rows is None else len(program) - _EACH
        inline: Inline | None = getattr(attend, "inline", None)
        if inline is not None and self._takes(inline, positions):
            first.turn.check_limits(positions)
            self._run_inline(program[:ahead], positions, inline, hidden.dtype)
        else:
            self._run_by_layer(program[:ahead], positions, attend, hidden.dtype)
        if rows is not None:
            self._run_last(program, positions, attend, hidden, rows)
        return hidden

    def compile_inline(self, inline: Inline) -> None:
        """Compile now what runs steps like this one of no tokens, rather than in the first step."""
        program = np.zeros((0, self._kernels.WIDTH), np.int64)
        rest = np.zeros(0, np.int64), 1, *kept_scratch(1, 0, 0), np.zeros(6, np.int64)
        self._run_layers(program, self._eps[:0], *rest, inline.planes, inline.slots, *inline.rest)

    def _addressed(self, hidden: Tensor) -> tuple[NDArray[np.int64], Tensor]:
        """All operations on these rows, and what lies between those of an MLP: keep it for so long."""
        num_rows, first = len(hidden), self._layers[0]
        program = self._program(num_rows, torch.get_num_threads()).copy()
        inner = torch.empty((num_rows, first.inner.out_width), dtype=hidden.dtype)
        for link, source in ((_QKV, hidden), (_INNER, hidden), (_DOWN, inner)):
            program[link::_EACH, X] = source.data_ptr()
        for link, into in ((_OUTPUT, hidden), (_INNER, inner), (_DOWN, hidden)):
            program[link::_EACH, OUT] = into.data_ptr()
        return program, inner

    def _run_by_layer(
        self, program: NDArray[np.int64], positions: Tensor, attend: Attend, dtype: torch.dtype
    ) -> None:
        """Whole layers, the first ones of the chain."""
        run, begin = self._run(len(positions), positions), 0
        for number in range(len(program) // _EACH):
            end = _EACH * number + _OUTPUT
            heads = self._heads(program, number, len(positions), dtype)
            run(program, begin, end)
            if number == 0:
                self._layers[0].turn.check_done(program[_TURN])
            mixed = self._mixed(attend, number, *heads)
            program[end, X] = mixed.data_ptr()
            begin = end
        run(program, begin, len(program))

    def _run_last(
        self, program: NDArray[np.int64], positions: Tensor, attend: Attend, hidden: Tensor, rows: Tensor
    ) -> None:  # fmt: skip
        """The last layer, of which only these rows are wanted behind K/V."""
        number = len(self._layers) - 1
        begin = _EACH * number
        q, k, v = self._heads(program, number, len(hidden), hidden.dtype)
        self._run(len(hidden), positions)(program, begin, begin + _OUTPUT)
        self._layers[0].turn.check_done(program[begin + _TURN])
        mixed = self._mixed(attend, number, q[rows], k, v)
        if len(rows):
            some = hidden[rows]
            program, _inner = self._addressed(some)
            program[begin + _OUTPUT, X] = mixed.data_ptr()
            self._run(len(some), positions)(program, begin + _OUTPUT, len(program))
            hidden[rows] = some
        spoil(hidden, k, v)

    def _run(
        self, num_rows: int, positions: Tensor
    ) -> Callable[[NDArray[np.int64], int, int], None]:
        """What runs the operations [from, to) of a program on so many rows."""
        num_workers, at = torch.get_num_threads(), positions.contiguous().numpy()
        floats = self._floats(num_rows, num_workers)
        scratch = kept_scratch(num_workers, floats, _EACH * len(self._layers))

        def run(program: NDArray[np.int64], begin: int, end: int) -> None:
            use_threads(num_workers)  # attention has its own number
            some = slice(begin, end)
            self._kernels.run_all(program[some], self._eps[some], at, num_workers, *scratch)

        return run

    def _heads(
        self, program: NDArray[np.int64], number: int, num_rows: int, dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        """Where the first operations of a layer will put q, k and v."""
        at = _EACH * number
        rows = torch.empty((num_rows, sum(self._num_heads), self._head_dim), dtype=dtype)
        program[at + _QKV, OUT] = program[at + _TURN, ROWS] = rows.data_ptr()
        return rows.split_with_sizes(self._num_heads, 1)

    def _mixed(self, attend: Attend, number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """What attention makes of these, contiguous."""
        mixed = attend(number, q, k, v)
        if mixed.shape != q.shape or mixed.dtype != q.dtype or not mixed.is_cpu:
            raise ConfigError(
                f"attend returned {mixed.dtype} {tuple(mixed.shape)} on {mixed.device}; it must "
                f"return {q.dtype} {tuple(q.shape)} on cpu"
            )
        return mixed.contiguous()

    def _takes(self, inline: Inline, positions: Tensor) -> bool:
        num_rows, (num_q, _, _) = len(positions), self._num_heads
        if num_rows > INLINE_ROWS:
            num_keys = int(positions.numpy().max()) + 1
            seen = 2 * len(self._layers) * num_q * self._head_dim * num_keys
            if num_rows * (self._num_weights + seen) > INLINE_WORK:
                return False
        dtype = self._layers[0].qkv.kind[0]
        kind = dtype, len(self._layers), *self._num_heads, self._head_dim
        found = inline.kind, inline.num_workers, len(inline.slots)
        return found == (kind, torch.get_num_threads(), num_rows)

    def _run_inline(
        self, program: NDArray[np.int64], positions: Tensor, inline: Inline, dtype: torch.dtype
    ) -> None:  # fmt: skip
        """Layers with their attention: the Python around each takes as long as a small one."""
        num_rows, size = len(inline.slots), dtype.itemsize
        num_q, num_k, num_v = (heads * self._head_dim for heads in self._num_heads)
        rows = torch.empty((num_rows, num_q + num_k + num_v), dtype=dtype)
        mixed = torch.empty((num_rows, num_q), dtype=dtype)
        if inline.num_tokens < num_rows:
            mixed[inline.num_tokens :] = 0
        program[_QKV::_EACH, OUT] = program[_TURN::_EACH, ROWS] = rows.data_ptr()
        program[_OUTPUT::_EACH, X] = mixed.data_ptr()
        numbers = np.array(
            [KINDS[dtype], rows.data_ptr(), rows.stride(0) * size, num_q * size,
             (num_q + num_k) * size, mixed.data_ptr()]
        )  # fmt: skip
        operations = len(program) + len(self._layers) * inline.num_phases
        use_threads(inline.num_workers)
        floats = self._floats(num_rows, inline.num_workers)
        scratch = kept_scratch(inline.num_workers, floats, operations)
        rest = positions.contiguous().numpy(), inline.num_workers, *scratch, numbers
        self._run_layers(program, self._eps, *rest, inline.planes, inline.slots, *inline.rest)


def _scratch_floats(links: Links, num_rows: int, num_workers: int) -> int:
    """What each worker needs for any product of a layer."""
    products = [link for link in links if isinstance(link, Panels)]
    return max(link.scratch_floats(num_rows, num_workers) for link in products)


def _program(layers: Sequence[Links], num_rows: int, num_workers: int) -> NDArray[np.int64]:
    """The numbers of all operations, but for addresses: [operations, WIDTH]."""
    from ramify.models import chain_kernels as kernels

    found = np.zeros((_EACH * len(layers), kernels.WIDTH), np.int64)
    for at, link in enumerate(link for links in layers for link in links):
        if isinstance(link, Turn):
            numbers = link.numbers(num_rows, layers[0].qkv.row_bytes, num_workers)
        else:
            numbers = link.numbers(num_rows, num_workers, add=at % _EACH in (_OUTPUT, _DOWN))
        found[at] = numbers
    return found
