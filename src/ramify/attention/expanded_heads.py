"""`ExpandedHeads`: expanded latent attention of whole requests, a few heads at a time, by a backend for K and V.

Keys and values of some heads are computed from the latents of all tokens of a request, into pages of their
own, over which the backend attends. So no results of chunks are merged, and memory is bounded by the
number of heads. For devices whose attention over K and V is faster than torch's over chunks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ramify.attention.backend import AttentionBackend
from ramify.attention.batch import AttentionBatch, Extend
from ramify.attention.spec import AttentionSpec
from ramify.attention.staging_buffers import upload_together
from ramify.kv.block_table import PagedBlockTable
from ramify.kv.layout import read_plane

MAX_BYTES = 256 << 20  # of K and V at a time; the K and V of a head are more for very long requests


@dataclass(frozen=True, slots=True, eq=False)
class HeadsPlan:
    """The expanded requests of a step."""

    slots: Tensor  # [pages * page_size] int64: of every token's latents; any beyond the last of a request
    num_heads: int  # at a time
    attention: Any  # the plan of the backend for so many heads


class ExpandedHeads:
    """Expands and attends by `backend`, for `kind="mha"` with as many K/V heads as query heads.

    Args:
        backend: `heads_spec` of it must be supported.
        spec: of latent attention, not exact.
        nope_dim, value_dim: per head.
        max_bytes: of K and V at a time.
    """

    def __init__(
        self,
        backend: type[AttentionBackend],
        spec: AttentionSpec,
        *,
        nope_dim: int,
        value_dim: int,
        device: torch.device,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._backend, self._spec, self._device = backend, spec, device
        self._nope_dim, self._value_dim, self._max_bytes = nope_dim, value_dim, max_bytes
        self._made = dict[int, AttentionBackend]()  # by number of heads
        self._scratch = torch.empty(0, dtype=spec.dtype, device=device)

    def plan(self, batch: AttentionBatch) -> HeadsPlan:
        """Place the tokens of each request in pages of their own, one request after the other."""
        size = batch.page_size
        tables, slots, extends = list[list[int]](), list[Any](), list[Extend]()
        num_pages = 0
        for seq in range(batch.num_seqs):
            kv_slots = batch.kv_slots(seq)
            count = -(-len(kv_slots) // size)
            tables.append(list(range(num_pages, num_pages + count)))
            num_pages += count
            slots.append(np.pad(kv_slots, (0, count * size - len(kv_slots)), mode="edge"))
            cached = int(batch.num_cached[seq])
            extends.append(Extend(seq, seq, cached, len(kv_slots) - cached))
        [on_device] = upload_together([np.concatenate(slots)], self._device)
        num_heads = self._heads_at_a_time(num_pages * size)
        if num_heads not in self._made:
            spec = heads_spec(
                self._spec, num_heads, nope_dim=self._nope_dim, value_dim=self._value_dim
            )
            self._made[num_heads] = self._backend(spec, self._device)
        own = AttentionBatch.build(extends, PagedBlockTable.of(tables, size))
        return HeadsPlan(on_device, num_heads, self._made[num_heads].plan(own))

    def run(
        self,
        plan: HeadsPlan,
        q: Tensor,
        w_uk: Tensor,
        w_uv: Tensor,
        planes: Mapping[str, Tensor],
    ) -> Tensor:
        """Attention output of the planned requests: [T, num_heads, value_dim] like q.

        Args:
            q: [T, num_heads, nope_dim + rope_dim], of these requests alone.
            w_uk: [num_heads, nope_dim, latent_dim].
            w_uv: [num_heads, latent_dim, value_dim].
        """
        count, size = plan.num_heads, self._spec.page_size
        latents, rope = (
            read_plane(planes, name, plan.slots).to(w_uk.dtype) for name in ("latent", "rope")
        )
        keys, values = self._pages(len(plan.slots), count)
        keys[..., self._nope_dim :] = rope[:, None]
        pages = {name: x.unflatten(0, (-1, size)) for name, x in (("k", keys), ("v", values))}
        out = q.new_empty(*q.shape[:2], self._value_dim)
        for first in range(0, q.shape[1], count):
            heads = slice(first, first + count)
            up = w_uk[heads].flatten(0, 1).T
            keys[..., : self._nope_dim] = (latents @ up).unflatten(1, (count, -1))
            down = w_uv[heads].transpose(0, 1).flatten(1)
            torch.matmul(latents, down, out=values.flatten(1))
            rows = q[:, heads].contiguous()
            out[:, heads] = self._made[count].run(plan.attention, 0, rows, pages)
        return out

    def _heads_at_a_time(self, num_tokens: int) -> int:
        """The most heads whose K and V fit, a divisor of all."""
        spec = self._spec
        width = self._nope_dim + spec.head_dim - spec.v_head_dim + self._value_dim
        fitting = self._max_bytes // (num_tokens * width * spec.dtype.itemsize)
        divisors = [count for count in range(1, spec.num_heads + 1) if spec.num_heads % count == 0]
        return max([count for count in divisors if count <= fitting], default=1)

    def _pages(self, num_tokens: int, num_heads: int) -> tuple[Tensor, Tensor]:
        """Room for K and V [num_tokens, num_heads, ...] in a buffer that grows."""
        rope_dim = self._spec.head_dim - self._spec.v_head_dim
        shapes = [
            (num_tokens, num_heads, width) for width in (self._nope_dim + rope_dim, self._value_dim)
        ]
        sizes = [num_tokens * num_heads * width for *_, width in shapes]
        if sum(sizes) > len(self._scratch):
            self._scratch = self._scratch.new_empty(sum(sizes))
        keys, values = self._scratch[: sum(sizes)].split(sizes)
        return keys.view(shapes[0]), values.view(shapes[1])


def heads_spec(
    spec: AttentionSpec, num_heads: int, *, nope_dim: int, value_dim: int
) -> AttentionSpec:
    """The attention over expanded K and V of `num_heads` heads of latent attention."""
    return replace(
        spec,
        kind="mha",
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=nope_dim + spec.head_dim - spec.v_head_dim,
        value_dim=value_dim,
        kv_dtype=None,
        windows=(None,),
    )
