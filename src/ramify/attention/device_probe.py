"""Probe on its device whether a backend's rows have the same bits in every batch and in every chunk."""

from __future__ import annotations

import torch
from torch import Tensor

from ramify.attention.backend import AttentionBackend
from ramify.attention.batch import AttentionBatch, Extend
from ramify.attention.spec import AttentionSpec
from ramify.kv.block_table import PagedBlockTable
from ramify.kv.pool import KVLayout, KVPool

# (computed tokens, new tokens) of requests: prefills and decodes, of one split of keys and of several
REQUESTS = ((0, 70), (0, 1), (31, 5), (520, 1), (1100, 1), (600, 130))


def batch_variant_requests(
    backend: AttentionBackend,
    spec: AttentionSpec,
    device: torch.device,
    requests: tuple[tuple[int, int], ...] = REQUESTS,
) -> list[int]:
    """Which requests have other bits alone, or in two chunks, than in one batch with all others.

    Args:
        spec: of K and V planes in nhd, not sparse.
        requests: computed and new tokens of each.

    The layers that are tried are the first of each window.
    """
    draw, size = torch.Generator().manual_seed(0), spec.page_size
    table, num_pages = list[list[int]](), 0
    for lengths in requests:
        count = -(-sum(lengths) // size)
        table.append(list(range(num_pages, num_pages + count)))
        num_pages += count
    layout = KVLayout.mha(1, spec.num_kv_heads, spec.head_dim, spec.v_head_dim)
    pool = KVPool(layout, num_pages, size, dtype=spec.plane_dtype, device=device)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw).to(device, spec.dtype)

    num_slots = num_pages * size
    values = {plane.name: random(num_slots, *plane.shape) for plane in layout.planes}
    pool.write_kv(0, torch.arange(num_slots, device=device), **values)
    sinks = torch.randn(spec.num_heads, generator=draw).to(device) if spec.sinks else None
    queries = [random(new, spec.num_heads, spec.head_dim) for _, new in requests]
    blocks = PagedBlockTable.of(table, size)

    def attend(layer: int, parts: list[tuple[int, int, int]]) -> Tensor:
        """Rows [from, to) of requests, in one batch."""
        extends = [
            Extend(number, number, requests[number][0] + begin, end - begin)
            for number, begin, end in parts
        ]
        rows = torch.cat([queries[number][begin:end] for number, begin, end in parts])
        plan = backend.plan(AttentionBatch.build(extends, blocks))
        return backend.run(plan, layer, rows, pool.planes(0), sinks=sinks)

    differing = set[int]()
    for layer in {window: at for at, window in reversed([*enumerate(spec.windows)])}.values():
        together = attend(layer, [(number, 0, new) for number, (_, new) in enumerate(requests)])
        for number, wanted in enumerate(together.split([new for _, new in requests])):
            new = requests[number][1]
            half = new // 3
            chunks = [(0, new)] if new < 2 else [(0, new), (0, half), (half, new)]
            for begin, end in chunks:
                if not _are_same_bits(attend(layer, [(number, begin, end)]), wanted[begin:end]):
                    differing.add(number)
    return sorted(differing)


def _are_same_bits(rows: Tensor, others: Tensor) -> bool:
    return torch.equal(rows.contiguous().view(torch.uint8), others.contiguous().view(torch.uint8))
