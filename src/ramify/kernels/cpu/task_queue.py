"""Workers that share the tasks of an operation, and go on to the next one together.

A worker takes one task after the other. When none is left it waits until those that others still
hold are done. Nobody waits who holds a task, so that there is always one who goes on, even where a
single thread plays all workers, one behind the other. A task must not raise: the others would wait
for it in vain.
"""

from __future__ import annotations

import platform
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ramify.kernels.cpu.jit import jit

COUNTER_BYTES = (
    16  # bytes from the counters of an operation to those of the next: of tasks taken, tasks done
)
SPINS_BEFORE_YIELD = 1000  # looks before a worker lets others have its processor: some 50 µs on x86
_SPINS_BEFORE_YIELD = SPINS_BEFORE_YIELD  # globals are constants to Numba
_BACK = 1 << 32
_i64, _int = ir.IntType(64), types.int64


@intrinsic
def atomic_add(_: Any, counter: Any, by: Any) -> Any:
    """The int64 at an address before it is raised; safe among threads."""

    def code(_: Any, builder: Any, __: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], _i64.as_pointer())
        return builder.atomic_rmw("add", pointer, args[1], "seq_cst")

    return _int(_int, _int), code


@intrinsic
def _atomic_load(_: Any, counter: Any) -> Any:
    """The int64 at an address, as the last thread left it."""

    def code(_: Any, builder: Any, __: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], _i64.as_pointer())
        return builder.load_atomic(pointer, "acquire", 8)

    return _int(_int), code


@intrinsic
def _pause(_: Any) -> Any:
    """Leave the processor's other thread alone for a moment."""

    def code(context: Any, builder: Any, _: Any, __: Any) -> Any:
        if platform.machine() in ("x86_64", "AMD64"):
            kind = ir.FunctionType(ir.VoidType(), [])
            name = "llvm.x86.sse2.pause"
            builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [])
        return context.get_dummy_value()

    return types.void(), code


@intrinsic
def _yield_cpu(_: Any) -> Any:
    """Let another thread have this processor, if one waits for it."""

    def code(context: Any, builder: Any, _: Any, __: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), [])
        name = "SwitchToThread" if platform.system() == "Windows" else "sched_yield"
        builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [])
        return context.get_dummy_value()

    return types.void(), code


@jit
def next_task(counter: int) -> Any:
    """The int64 at an address, raised by one for whoever asks next; safe among threads."""
    return atomic_add(counter, 1)


@jit
def next_task_from_either_end(counter: int, total: int, last: int) -> Any:
    """One of `total` tasks: the first, or if `last` is 1 the last of those left; -1 if none is.

    Whoever takes one beside the one taken before may have some of its work done. The int64 at the
    address counts those taken from the front in its low half, those from the back in the high one.
    """
    before = atomic_add(counter, 1 + last * (_BACK - 1))
    front, back = before % _BACK, before // _BACK
    if front + back >= total:
        return -1
    return total - 1 - back if last else front


@jit
def finish_and_wait(counters: int, done: int, num_tasks: int) -> None:
    """Say how many tasks of an operation this worker has done, and wait until all of them are."""
    atomic_add(counters + 8, done)
    looks = 0
    while _atomic_load(counters + 8) < num_tasks:
        looks += 1
        if looks < _SPINS_BEFORE_YIELD:
            _pause()
        else:
            _yield_cpu()
