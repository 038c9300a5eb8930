"""Task queue of an op: workers take tasks by an atomic counter, then meet at a barrier.

A worker that finds no task left waits until all tasks of the op are done. It holds none while it
waits, so the op always makes progress, even where a single thread runs all workers one after the
other. A task must not raise: the other workers would wait forever.

An op has two int64 counters: tasks taken, tasks done.
"""

from __future__ import annotations

import platform
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ramify.kernels.cpu.jit import jit
from ramify.kernels.cpu.simd import call_function, i32, i64

COUNTER_BYTES = 16  # of an op's two counters
SPINS_BEFORE_YIELD = 1000  # about 50 µs on x86
_BACK = 1 << 32
_int = types.int64


@intrinsic
def atomic_add(_: Any, counter: Any, value: Any) -> Any:
    """Add to the int64 at an address; returns the value before."""

    def code(_: Any, builder: Any, __: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], i64.as_pointer())
        return builder.atomic_rmw("add", pointer, args[1], "seq_cst")

    return _int(_int, _int), code


@intrinsic
def _atomic_load(_: Any, counter: Any) -> Any:
    """Load the int64 at an address, with acquire order."""

    def code(_: Any, builder: Any, __: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], i64.as_pointer())
        return builder.load_atomic(pointer, "acquire", 8)

    return _int(_int), code


@intrinsic
def _pause(_: Any) -> Any:
    """Spin-wait hint: leaves the core to its other hardware thread for a moment."""

    def code(context: Any, builder: Any, _: Any, __: Any) -> Any:
        if platform.machine() in ("x86_64", "AMD64"):
            call_function(builder, "llvm.x86.sse2.pause", ir.VoidType())
        return context.get_dummy_value()

    return types.void(), code


@intrinsic
def _yield_cpu(_: Any) -> Any:
    """Yield the CPU to another thread that is ready."""

    def code(context: Any, builder: Any, _: Any, __: Any) -> Any:
        name = "SwitchToThread" if platform.system() == "Windows" else "sched_yield"
        call_function(builder, name, i32)
        return context.get_dummy_value()

    return types.void(), code


@jit
def next_task(counter: int) -> Any:
    """Take the next task: the counter at an address before it is incremented."""
    return atomic_add(counter, 1)


@jit
def next_task_from_either_end(counter: int, total: int, from_back: int) -> Any:
    """Take the first (or, with `from_back` = 1, the last) task that is left of `total`; -1 if none.

    A worker gets neighbouring tasks from its end, which can share work. The counter holds the tasks
    taken from the front in its low half, those from the back in its high half.
    """
    taken = atomic_add(counter, 1 + from_back * (_BACK - 1))
    num_front, num_back = taken % _BACK, taken // _BACK
    if num_front + num_back >= total:
        return -1
    return total - 1 - num_back if from_back else num_front


@jit
def finish_and_wait(counters: int, done: int, num_tasks: int) -> None:
    """Barrier of an op: report `done` tasks of this worker, then wait until all are done."""
    atomic_add(counters + 8, done)
    spins = 0
    while _atomic_load(counters + 8) < num_tasks:
        spins += 1
        if spins < SPINS_BEFORE_YIELD:
            _pause()
        else:
            _yield_cpu()
