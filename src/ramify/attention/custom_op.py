"""Attention as one operator that torch.compile does not look into."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ramify.attention.backend import AttentionBackend
from ramify.attention.batch import AttentionBatch

_numbers = count()
_alive: WeakValueDictionary[int, AttentionCustomOp] = WeakValueDictionary()


class AttentionCustomOp:
    """A backend and the plan of its current step, for use inside a compiled model.

    `plan` outside of the compiled code, once per step; the instance is called once per layer inside
    of it, with arguments whose kinds do not change from step to step, so that nothing is compiled
    anew. The operator finds the instance by its number.
    """

    def __init__(self, backend: AttentionBackend, value_dim: int) -> None:
        self.backend, self.value_dim = backend, value_dim
        self.number = next(_numbers)
        self.step: Any = None  # nothing planned yet: `run` has no batch
        _alive[self.number] = self

    def plan(self, batch: AttentionBatch) -> None:
        """Attend over this batch from now on."""
        self.step = self.backend.plan(batch)

    def __call__(
        self, layer: int, q: Tensor, planes: Mapping[str, Tensor], selected: Tensor | None = None
    ) -> Tensor:
        """See `AttentionBackend.run`."""
        names = list(planes)
        mixed: Tensor = torch.ops.ramify.attend(
            q,
            [planes[name] for name in names],
            ",".join(names),
            selected,
            layer,
            self.number,
            self.value_dim,
        )
        return mixed


@torch.library.custom_op("ramify::attend", mutates_args=())
def attend(
    q: Tensor,
    planes: list[Tensor],
    names: str,
    selected: Tensor | None,
    layer: int,
    number: int,
    value_dim: int,
) -> Tensor:
    """Attention output, [tokens, num_heads, value_dim]; the planes by their names' order."""
    found = _alive[number]
    named = dict(zip(names.split(","), planes, strict=True))
    mixed = found.backend.run(found.step, layer, q, named, selected=selected)
    assert mixed.shape[-1] == value_dim
    return mixed


@attend.register_fake
def _(q: Tensor, *rest: Any) -> Tensor:
    return q.new_empty(*q.shape[:-1], rest[-1])
