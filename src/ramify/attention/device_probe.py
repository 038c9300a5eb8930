"""Probe on its device whether rows of attention and of the sparse index have the same bits in every batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ramify.attention.backend import AttentionBackend
from ramify.attention.batch import AttentionBatch, Extend
from ramify.attention.paged_index import PagedIndex
from ramify.attention.sparse_index import IndexQuery
from ramify.attention.spec import AttentionSpec
from ramify.kv.block_table import PagedBlockTable
from ramify.kv.layout import Plane
from ramify.kv.pool import KVLayout, KVPool

# (computed tokens, new tokens) of requests: prefills and decodes, of one split of keys and of several
REQUESTS = ((0, 70), (0, 1), (31, 5), (520, 1), (1100, 1), (600, 130))
NUM_SELECTED = 300  # keys of a row of sparse attention

Requests = tuple[tuple[int, int], ...]
Part = tuple[int, int, int]  # a request, and its new rows from the second to before the third
Compute = Callable[[AttentionBatch, list[Part]], Tensor]


def batch_variant_requests(
    backend: AttentionBackend,
    spec: AttentionSpec,
    device: torch.device,
    requests: Requests = REQUESTS,
) -> list[int]:
    """Which requests have other bits alone, or in two chunks, than in one batch with all others.

    Args:
        spec: of planes in nhd.
        requests: computed and new tokens of each.

    The layers that are tried are the first of each window.
    """
    draw = torch.Generator().manual_seed(0)
    if spec.kind == "mla":
        layout = KVLayout.mla(1, spec.v_head_dim, spec.head_dim - spec.v_head_dim)
    else:
        layout = KVLayout.mha(1, spec.num_kv_heads, spec.head_dim, spec.v_head_dim)
    pool = _filled_pool(layout, spec.page_size, spec.plane_dtype, spec.dtype, device, requests)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw).to(device, spec.dtype)

    sinks = torch.randn(spec.num_heads, generator=draw).to(device) if spec.sinks else None
    queries = [random(new, spec.num_heads, spec.head_dim) for _, new in requests]
    selections = [_selection(cached, new, draw).to(device) for cached, new in requests]

    differing = set[int]()
    for layer in {window: at for at, window in reversed([*enumerate(spec.windows)])}.values():

        def attend(batch: AttentionBatch, parts: list[Part], layer: int = layer) -> Tensor:
            rows, selected = _rows_of(queries, parts), None
            if spec.sparse:
                selected = _rows_of(selections, parts)
            plan = backend.plan(batch)
            return backend.run(plan, layer, rows, pool.planes(0), selected=selected, sinks=sinks)

        differing |= _variant_requests(attend, spec.page_size, requests)
    return sorted(differing)


def batch_variant_scores(
    index: PagedIndex, spec: AttentionSpec, requests: Requests = REQUESTS
) -> list[int]:
    """Which requests have other scores of the sparse index alone, or in two chunks, than in one batch."""
    draw, device = torch.Generator().manual_seed(0), index.device
    # That all rows are scored.
    scored = PagedIndex(
        top_k=1,
        num_heads=index.num_heads,
        head_dim=index.head_dim,
        device=device,
        page_size=spec.page_size,
    )
    layout = KVLayout(1, (Plane("index_key", (index.head_dim,)),))
    pool = _filled_pool(layout, spec.page_size, spec.plane_dtype, spec.dtype, device, requests)
    queries, weights = (
        [torch.randn(new, *shape, generator=draw).to(device, dtype) for _, new in requests]
        for shape, dtype in (
            ((index.num_heads, index.head_dim), spec.dtype),
            ((index.num_heads,), torch.float32),
        )
    )
    most_keys = max(map(sum, requests))

    def score(batch: AttentionBatch, parts: list[Part]) -> Tensor:
        plan = scored.plan(batch)
        query = IndexQuery(_rows_of(queries, parts), _rows_of(weights, parts))
        out = torch.full((batch.num_tokens, most_keys), -torch.inf, device=device)
        for group in plan.groups:
            columns = scored.scores(plan, group, query, pool.planes(0))[:, :most_keys]
            out[group.start : group.stop, : columns.shape[1]] = columns
        # Where every row sees one key, nothing is scored.
        out[torch.from_numpy(batch.positions == 0).to(device)] = 0.0
        return out

    return sorted(_variant_requests(score, spec.page_size, requests))


def _variant_requests(compute: Compute, page_size: int, requests: Requests) -> set[int]:
    """Compare the rows of each request in one batch with those alone and in two chunks."""
    blocks = PagedBlockTable.of(_tables(requests, page_size), page_size)

    def rows_of(parts: list[Part]) -> Tensor:
        extends = [
            Extend(number, number, requests[number][0] + begin, end - begin)
            for number, begin, end in parts
        ]
        return compute(AttentionBatch.build(extends, blocks), parts)

    differing, lengths = set[int](), [new for _, new in requests]
    together = rows_of([(number, 0, new) for number, new in enumerate(lengths)])
    for number, wanted in enumerate(together.split(lengths)):
        new = lengths[number]
        half = new // 3
        chunks = [(0, new)] if new < 2 else [(0, new), (0, half), (half, new)]
        for begin, end in chunks:
            if not _are_same_bits(rows_of([(number, begin, end)]), wanted[begin:end]):
                differing.add(number)
    return differing


def _filled_pool(
    layout: KVLayout,
    page_size: int,
    stored: torch.dtype,
    dtype: torch.dtype,
    device: torch.device,
    requests: Requests,
) -> KVPool:
    """A pool with the pages of all requests, which hold random values."""
    draw = torch.Generator().manual_seed(1)
    num_pages = sum(map(len, _tables(requests, page_size)))
    pool = KVPool(layout, num_pages, page_size, dtype=stored, device=device)
    num_slots = num_pages * page_size
    values = {
        plane.name: torch.randn(num_slots, *plane.shape, generator=draw).to(device, dtype)
        for plane in layout.planes
    }
    pool.write_kv(0, torch.arange(num_slots, device=device), **values)
    return pool


def _tables(requests: Requests, page_size: int) -> list[list[int]]:
    """The pages of each request, one request after the other."""
    tables, num_pages = list[list[int]](), 0
    for lengths in requests:
        count = -(-sum(lengths) // page_size)
        tables.append(list(range(num_pages, num_pages + count)))
        num_pages += count
    return tables


def _selection(cached: int, new: int, draw: torch.Generator) -> Tensor:
    """Random positions that each new row sees: [new, NUM_SELECTED] int32, ascending, then -1."""
    selected = torch.full((new, NUM_SELECTED), -1, dtype=torch.int32)
    for row in range(new):
        keys = torch.randperm(cached + row + 1, generator=draw)[:NUM_SELECTED].sort().values
        selected[row, : len(keys)] = keys.int()
    return selected


def _rows_of(of_requests: list[Tensor], parts: list[Part]) -> Tensor:
    return torch.cat([of_requests[number][begin:end] for number, begin, end in parts])


def _are_same_bits(rows: Tensor, others: Tensor) -> bool:
    return torch.equal(rows.contiguous().view(torch.uint8), others.contiguous().view(torch.uint8))
