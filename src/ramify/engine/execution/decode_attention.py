"""`DecodeAttention`: paged attention of one query row for each request, in plain torch operations.

All that differs between steps is in tensors of fixed addresses and shapes, so that a step can be
captured as a graph. The reference for kernels that read the same tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ramify.attention.spec import AttentionSpec
from ramify.kv.layout import read_plane
from ramify.kv.pool import KVPool


class DecodeAttention:
    """Attention of a decode step of B rows, called by a decoder layer by layer.

    Args:
        table: [rows, max_pages] int64 pages.
        rows: [B] int64, the row of `table` of each query.
        positions: [B] int64, of each query; it sees its own and the positions before.
        slots: [B] int64, where its K/V goes.
        num_pages: of `table` that are read: those of the longest request or more.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        pool: KVPool,
        *,
        table: Tensor,
        rows: Tensor,
        positions: Tensor,
        slots: Tensor,
        num_pages: int,
    ) -> None:
        self._spec, self._pool, self._slots = spec, pool, slots
        size, device = pool.page_size, pool.device
        offsets = torch.arange(size, device=device)
        pages = table[rows, :num_pages]
        self._keys = (pages[:, :, None] * size + offsets).flatten()  # [B * L] slots
        ages = positions[:, None] - torch.arange(num_pages * size, device=device)
        self._visible = {
            window: (ages >= 0) if window is None else (ages >= 0) & (ages < window)
            for window in set(spec.windows)
        }

    def __call__(
        self,
        layer: int,
        q: Tensor,
        *kv: Tensor,
        rows: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Write the K/V of a layer, then attend: [B, num_heads, head_dim], computed in float32."""
        assert rows is None, "a decode step has no rows to leave out"
        spec, pool, num_rows = self._spec, self._pool, len(q)
        names = [plane.name for plane in pool.layout.planes]
        pool.write_kv(layer, self._slots, **dict(zip(names, kv, strict=True)))
        planes, visible = pool.planes(layer), self._visible[spec.windows[layer]]
        # Each has shape [B, kv_heads, L, dim].
        keys, values = (
            read_plane(planes, name, self._keys)
            .float()
            .unflatten(0, (num_rows, -1))
            .transpose(1, 2)
            for name in ("k", "v")
        )
        query = q.float().unflatten(1, (spec.num_kv_heads, spec.gqa_group_size))
        scores = query @ keys.transpose(2, 3) * spec.scale
        if spec.soft_cap is not None:
            scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
        scores = scores.masked_fill(~visible[:, None, None], -torch.inf)
        if sinks is None:
            weights = scores.softmax(-1)
        else:
            column = sinks.float().view(1, spec.num_kv_heads, -1, 1).expand(num_rows, -1, -1, 1)
            weights = torch.cat((scores, column), -1).softmax(-1)[..., :-1]
        values = values.masked_fill(~visible[:, None, :, None], 0.0)  # may be NaN
        attended: Tensor = weights @ values
        return attended.flatten(1, 2).to(q.dtype)
