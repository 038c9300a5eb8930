"""Decoder layers one by one: the reference of every fused form, on any device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from ramify.attention.paged import PagedBackend
from ramify.kv.pool import KVPool
from ramify.models.ops.functional import mark_nonfinite_rows
from ramify.models.ops.protocol import DecoderLayer, ForwardStep


class LayerLoop:
    """A `LayerStack` that calls each layer in turn."""

    def __init__(self, layers: Sequence[DecoderLayer]) -> None:
        self.layers = list(layers)

    def __call__(self, hidden: Tensor, step: ForwardStep) -> Tensor:
        """See `LayerStack`."""
        whole = step if step.output_rows is None else replace(step, output_rows=None)
        for layer in self.layers:
            attended = layer.attend(hidden, step if layer is self.layers[-1] else whole)
            if len(attended.rows) == len(hidden):
                hidden = layer.finish(hidden, attended.rows, whole)
            else:
                rows = step.output_rows
                assert rows is not None
                hidden[rows] = layer.finish(hidden[rows], attended.rows, whole.select(rows))
                mark_nonfinite_rows(hidden, *attended.kv)
        return hidden

    def warm_up(self, backend: PagedBackend, pool: KVPool) -> None:
        """Nothing to compile."""
