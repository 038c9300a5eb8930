"""Arguments of K/V write and attention inside the fused layers, in place of a Python call per layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ramify.attention.backends.cpu import CpuBackend, validate_compiled_planes
from ramify.attention.backends.cpu_partition import CpuAttentionPlan
from ramify.attention.inputs import validate_sinks
from ramify.errors import ConfigError
from ramify.kernels.cpu.threads import ROW_KINDS
from ramify.kv.pool import KVPool


class FusedAttentionArgs(NamedTuple):
    """What `run_fused_layers` needs to write a step's K/V and to attend over it."""

    kind: tuple[object, ...]  # dtype, num_layers, q heads, k heads, v heads, head_dim
    num_workers: int
    num_tokens: int  # rows beyond are padding
    num_phases: int  # of attention, each an op with a barrier
    # [num_layers, 4]: addresses of the K and the V plane; window or 0; address of the sinks or 0
    planes: NDArray[np.int64]
    slots: NDArray[np.int64]  # [T], padding rows included
    kernel_args: tuple[Any, ...]  # the last arguments of `fused_layers.run_fused_layers`


class FusedAttention:
    """Makes the arguments of steps over a CPU backend and a pool, which it does not keep alive.

    Args:
        backend, pool, sinks: those for which `supports` returns None; the caller keeps `sinks` alive.
    """

    def __init__(self, backend: CpuBackend, pool: KVPool, sinks: Sequence[Tensor | None]) -> None:
        self.backend = backend
        layers, spec = range(pool.layout.num_layers), backend.spec
        heads = spec.num_heads, spec.num_kv_heads, spec.num_kv_heads
        self._kind = spec.plane_dtype, len(layers), *heads, spec.head_dim
        self._num_slots = (pool.num_pages + 1) * pool.page_size
        # The pool never moves its planes.
        self._addresses = np.array(
            [
                [
                    *(pool.planes(layer)[name].data_ptr() for name in "kv"),
                    spec.windows[layer] or 0,
                    0 if logits is None else logits.data_ptr(),
                ]
                for layer, logits in zip(layers, sinks, strict=True)
            ]
        )

    @staticmethod
    def supports(
        backend: object, pool: KVPool, dtype: torch.dtype, sinks: Sequence[Tensor | None]
    ) -> str | None:
        """None if fused layers can replace this backend's calls over this pool, else the reason.

        Subclasses are refused: the fused layers would bypass what they override.

        Args:
            dtype: of q, k and v.
            sinks: of each layer, float32 [num_heads]; None: it has none.
        """
        if type(backend) is not CpuBackend or type(pool) is not KVPool:
            return f"{type(backend).__name__} over {type(pool).__name__}"
        spec, first = backend.spec, pool.planes(0)
        if len(sinks) != pool.layout.num_layers:
            return f"{len(sinks)} layers over {pool.layout.num_layers} of K/V"
        if spec.kind != "mha" or spec.sparse or {*first} != {"k", "v"}:
            return f"{spec.kind} over planes {', '.join(first)}"
        if spec.v_head_dim != spec.head_dim:
            return f"keys of {spec.head_dim} and values of {spec.v_head_dim} elements"
        if dtype not in ROW_KINDS or {dtype} != {
            spec.plane_dtype,
            *(plane.dtype for plane in first.values()),
        }:
            return f"K/V in {first['k'].dtype} of a model in {dtype}"
        try:
            for layer in range(pool.layout.num_layers):
                validate_compiled_planes(pool.planes(layer), spec)
                validate_sinks(sinks[layer], spec)
        except ConfigError as error:
            return str(error)
        return None

    def step(self, pool: KVPool, plan: object, slots: NDArray[np.int64]) -> FusedAttentionArgs:
        """The arguments of one step.

        Args:
            pool: the same again.
            plan: the backend's plan of the step.
            slots: [T] int64, of every token and every padding row.

        Raises:
            IndexError: a slot is outside the planes.
        """
        assert isinstance(plan, CpuAttentionPlan)
        outside = slots[(slots < 0) | (slots >= self._num_slots)]
        if len(outside):
            raise IndexError(f"slot {outside[0]} is not in 0..{self._num_slots - 1}")
        kernel_args = self.backend.fused_layers_args(plan, pool.planes(0))
        workers = self.backend.num_workers
        counts = plan.num_tokens, len(plan.phases)
        return FusedAttentionArgs(self._kind, workers, *counts, self._addresses, slots, kernel_args)

    def empty_step(self, pool: KVPool) -> FusedAttentionArgs:
        """The arguments of a step without tokens, to compile the kernel with."""
        return self.step(pool, self.backend.empty_plan(), np.zeros(0, np.int64))
