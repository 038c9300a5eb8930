"""Run a function on all workers: the one parallel region of all kernels.

Numba compiles the body of a parallel loop, and all that it calls, four times: as a function, as a
generalized ufunc, inside its launcher and inside the caller. So the loop calls by address.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import prange, types
from numba.core import cgutils
from numba.extending import intrinsic

from ramify.kernels.cpu.jit import jit, parallel_jit
from ramify.kernels.cpu.simd import i64

_int = types.int64
_WORKER_ARGS = (_int, _int)  # address of the arguments, index of the worker


@intrinsic
def _worker_address(typing_context: Any, function: Any, args: Any) -> Any:
    """Address of a function that loads a tuple, and calls `function(*tuple, worker)`."""
    signature = function.get_call_type(typing_context, (*args.types, _int), {})

    def code(context: Any, builder: Any, _: Any, __: Any) -> Any:
        convention = context.call_conv
        function_type = convention.get_function_type(types.none, _WORKER_ARGS)
        name = builder.module.get_unique_name(f"{builder.function.name}.worker")
        worker = ir.Function(builder.module, function_type, name)
        worker.linkage = "internal"
        body = ir.IRBuilder(worker.append_basic_block())
        address, index = convention.get_arguments(worker)
        values = body.load(body.inttoptr(address, context.get_value_type(args).as_pointer()))
        call = context.get_function(function, signature)
        call(body, (*cgutils.unpack_tuple(body, values, len(args)), index))
        convention.return_value(body, context.get_dummy_value())
        return builder.ptrtoint(worker, i64)

    return _int(function, args), code


@intrinsic
def _stack_address(_: Any, args: Any) -> Any:
    """Address of a copy of a tuple on the stack of the calling function."""

    def code(_: Any, builder: Any, __: Any, values: Any) -> Any:
        return builder.ptrtoint(cgutils.alloca_once_value(builder, values[0]), i64)

    return _int(args), code


@intrinsic
def _call_worker(_: Any, function: Any, args: Any, worker: Any) -> Any:
    """Call a function by its address, see `_worker_address`."""

    def code(context: Any, builder: Any, _: Any, values: Any) -> Any:
        convention = context.call_conv
        function_type = convention.get_function_type(types.none, _WORKER_ARGS)
        address = builder.inttoptr(values[0], function_type.as_pointer())
        convention.call_function(builder, address, types.none, _WORKER_ARGS, values[1:])
        return context.get_dummy_value()

    return types.void(_int, _int, _int), code


@parallel_jit
def _launch(function: int, args: int, num_workers: int) -> None:
    # Numba may make `worker` unsigned.
    for worker in prange(num_workers):
        _call_worker(function, args, np.int64(worker))


@jit
def run_workers(function: Any, args: Any, num_workers: int) -> None:
    """Run `function(*args, worker)` for all workers [0, num_workers), in parallel."""
    _launch(_worker_address(function, args), _stack_address(args), num_workers)
