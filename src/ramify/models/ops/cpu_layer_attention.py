"""Attention inside a chain of compiled operations, in place of calls of Python layer by layer."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ramify.attention.backends.cpu import CpuBackend, validate_planes
from ramify.attention.backends.cpu_partition import CpuAttentionPlan
from ramify.errors import ConfigError
from ramify.kernels.cpu.threads import ROW_KINDS
from ramify.kv.pool import KVPool


class FusedAttentionArgs(NamedTuple):
    """What a chain needs to store K/V of a step and to attend over it by itself."""

    kind: tuple[object, ...]  # dtype, layers, heads of queries, of keys, of values; their elements
    num_workers: int
    num_tokens: int  # the rows behind them are padding
    num_phases: int  # of attention
    planes: NDArray[np.int64]  # [layers, 2]: addresses of K and of V
    slots: NDArray[np.int64]  # [T], padding included
    kernel_args: tuple[Any, ...]  # the last arguments of `fused_layers.run_fused_layers`


class FusedAttention:
    """A backend and a pool whose steps a chain can run.

    Args:
        backend, pool: such that `supports` is None.
    """

    def __init__(self, backend: CpuBackend, pool: KVPool) -> None:
        self.backend, self.pool = backend, pool  # the pool's planes stay where they are
        layers, spec = range(pool.layout.num_layers), backend.spec
        heads = spec.num_heads, spec.num_kv_heads, spec.num_kv_heads
        self._kind = spec.plane_dtype, len(layers), *heads, spec.head_dim
        self._num_slots = (pool.num_pages + 1) * pool.page_size
        self._addresses = np.array(
            [[pool.planes(layer)[name].data_ptr() for name in "kv"] for layer in layers]
        )

    @staticmethod
    def supports(backend: object, pool: KVPool, dtype: torch.dtype) -> str | None:
        """None if K/V of this pool is read and written as this backend does, else the reason.

        Args:
            dtype: of queries, keys and values.
        """
        if type(backend) is not CpuBackend or type(pool) is not KVPool:
            return f"{type(backend).__name__} over {type(pool).__name__}"
        spec, first = backend.spec, pool.planes(0)
        if spec.kind != "mha" or spec.sparse or {*first} != {"k", "v"}:
            return f"{spec.kind} over planes {', '.join(first)}"
        if spec.v_head_dim != spec.head_dim:
            return f"keys of {spec.head_dim} and values of {spec.v_head_dim} elements"
        if dtype not in ROW_KINDS or {dtype} != {
            spec.plane_dtype,
            *(one.dtype for one in first.values()),
        }:
            return f"K/V in {first['k'].dtype} of a model in {dtype}"
        if len(set(spec.windows)) > 1:
            return "layers with different windows"
        try:
            for layer in range(pool.layout.num_layers):
                validate_planes(pool.planes(layer), spec)
        except ConfigError as error:
            return str(error)
        return None

    def step(self, plan: object, slots: NDArray[np.int64]) -> FusedAttentionArgs:
        """What a chain is told of a step.

        Args:
            plan: of the backend.
            slots: [T] int64, of every token and of the padding rows.

        Raises:
            IndexError: a slot is outside the planes.
        """
        assert isinstance(plan, CpuAttentionPlan)
        outside = slots[(slots < 0) | (slots >= self._num_slots)]
        if len(outside):
            raise IndexError(f"slot {outside[0]} is not in 0..{self._num_slots - 1}")
        rest = self.backend.fused_layers_args(plan, self.pool.planes(0))
        workers = self.backend.num_workers
        counts = plan.num_tokens, len(plan.phases)
        return FusedAttentionArgs(self._kind, workers, *counts, self._addresses, slots, rest)

    def empty_step(self) -> FusedAttentionArgs:
        """A step of no tokens, to compile with."""
        return self.step(self.backend.empty_plan(), np.zeros(0, np.int64))
