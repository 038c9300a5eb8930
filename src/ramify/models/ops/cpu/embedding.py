"""Token embeddings on CPU: rows of a table, or of the packed LM head where a model ties the two."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ramify.models.ops.cpu.linear import PackedLinear
from ramify.models.ops.quantized import QuantizedWeight, Weight


class TokenRows:
    """The rows of an embedding table [vocab, hidden_size], multiplied by `factor` if there is one."""

    def __init__(self, table: Weight, factor: Tensor | None) -> None:
        self._table: Weight | PackedLinear = table
        self._factor = factor

    def __call__(self, token_ids: Tensor) -> Tensor:
        """[T] int64 -> [T, hidden_size]."""
        table = self._table
        if isinstance(table, PackedLinear):
            rows = table.weight_rows(token_ids)
        elif isinstance(table, QuantizedWeight):
            rows = table.rows(token_ids).dequantize()
        else:
            rows = F.embedding(token_ids, table)
        return rows if self._factor is None else rows * self._factor

    def share(self, head: PackedLinear) -> None:
        """Read the rows of a linear whose weight is this table, and drop the table.

        Weights in another dtype are another table; it stays.
        """
        if not isinstance(self._table, PackedLinear) and head.dtype == self._table.dtype:
            assert head.widths == (self._table.shape[1], self._table.shape[0])
            self._table = head
