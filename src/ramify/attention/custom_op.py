"""Attention as a torch.library custom operator, opaque to torch.compile."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ramify.attention.backend import AttentionBackend
from ramify.attention.batch import AttentionBatch
from ramify.errors import ConfigError

_next_id = count()
_instances: WeakValueDictionary[int, AttentionCustomOp] = WeakValueDictionary()


class AttentionCustomOp:
    """A backend with the plan of its current step, for use inside a compiled model.

    Call `plan` once per step outside the compiled code, and the instance once per layer inside.
    The argument types are the same at every step, so nothing is recompiled. The operator gets the
    instance as an integer id.
    """

    def __init__(self, backend: AttentionBackend, value_dim: int) -> None:
        self.backend, self.value_dim = backend, value_dim
        self.instance_id = next(_next_id)
        self.step: Any = None  # the backend's plan; None before the first `plan`
        _instances[self.instance_id] = self

    def plan(self, batch: AttentionBatch) -> None:
        """Plan the next step; later calls attend over this batch."""
        self.step = self.backend.plan(batch)

    def __call__(
        self,
        layer: int,
        q: Tensor,
        planes: Mapping[str, Tensor],
        selected: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See `AttentionBackend.run`.

        Raises:
            ConfigError: `plan` was not called, or as `run`.
        """
        names = list(planes)
        out: Tensor = torch.ops.ramify.attend(
            q,
            [planes[name] for name in names],
            ",".join(names),
            selected,
            layer,
            self.instance_id,
            self.value_dim,
            sinks,
        )
        return out


@torch.library.custom_op("ramify::attend", mutates_args=())
def attend(
    q: Tensor,
    planes: list[Tensor],
    names: str,
    selected: Tensor | None,
    layer: int,
    instance_id: int,
    value_dim: int,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention output [tokens, num_heads, value_dim]; `names` are the planes', comma-separated."""
    instance = _instances[instance_id]
    if instance.step is None:
        raise ConfigError("the step is not planned; call AttentionCustomOp.plan(batch) first")
    by_name = dict(zip(names.split(","), planes, strict=True))
    out = instance.backend.run(instance.step, layer, q, by_name, selected=selected, sinks=sinks)
    if out.shape[-1] != value_dim:
        raise ConfigError(
            f"value_dim={value_dim} but the backend's values are {out.shape[-1]} wide; make the "
            "AttentionCustomOp with that"
        )
    return out


@attend.register_fake
def _(
    q: Tensor,
    planes: list[Tensor],  # noqa: ARG001 - the operator's signature
    names: str,  # noqa: ARG001
    selected: Tensor | None,  # noqa: ARG001
    layer: int,  # noqa: ARG001
    instance_id: int,  # noqa: ARG001
    value_dim: int,
    sinks: Tensor | None = None,  # noqa: ARG001
) -> Tensor:
    return q.new_empty(*q.shape[:-1], value_dim)
