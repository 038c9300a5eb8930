"""Small batches over planes of every kind, to compare attention backends."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ramify.attention.backend import AttentionBackend
from ramify.attention.backends.triton import TileShapes, TritonBackend
from ramify.attention.batch import AttentionBatch, Extend
from ramify.attention.spec import AttentionSpec
from ramify.kv.block_table import PagedBlockTable

CPU = torch.device("cpu")
TILES = TileShapes(32, 32, 32, 64, 4, 4)  # several splits in a few hundred keys
FLOAT8_MAX = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


@dataclass(frozen=True)
class Step:
    """A batch, its queries and planes; every slot without a request's token is NaN."""

    batch: AttentionBatch
    q: Tensor  # [T, num_heads, head_dim]
    planes: dict[str, Tensor]
    selected: Tensor | None
    sinks: Tensor | None = None

    def take(self, rows: slice, batch: AttentionBatch) -> "Step":
        """The query rows `rows`, as another batch over the same planes."""
        selected = None if self.selected is None else self.selected[rows]
        return replace(self, batch=batch, q=self.q[rows], selected=selected)


def spec_of(**changes: object) -> AttentionSpec:
    base: dict[str, object] = {
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "page_size": 8,
        "dtype": torch.float32,
        "windows": (None,),
        "scale": 0.25,
        "exact": False,
    }
    return AttentionSpec(**(base | changes))  # type: ignore[arg-type]


def plane_shapes(spec: AttentionSpec) -> dict[str, tuple[int, ...]]:
    if spec.kind == "mla":
        return {"latent": (spec.v_head_dim,), "rope": (spec.head_dim - spec.v_head_dim,)}
    heads = spec.num_kv_heads
    return {"k": (heads, spec.head_dim), "v": (heads, spec.v_head_dim)}


def pages_of(lengths: list[int], page_size: int, noise: torch.Generator) -> list[list[int]]:
    """Scattered pages for requests of these lengths; three pages are unused."""
    counts = [-(-length // page_size) for length in lengths]
    pages = torch.randperm(sum(counts) + 3, generator=noise).tolist()
    return [[pages.pop() for _ in range(count)] for count in counts]


def planes_of(
    spec: AttentionSpec, rows: list[list[int]], lengths: list[int], noise: torch.Generator
) -> dict[str, Tensor]:
    """Planes with random values in the requests' slots; elsewhere NaN, or values with NaN scale."""
    num_pages = sum(len(pages) for pages in rows) + 4
    used = torch.zeros(num_pages, spec.page_size, dtype=torch.bool)
    for pages, length in zip(rows, lengths, strict=True):
        for position in range(length):
            used[pages[position // spec.page_size], position % spec.page_size] = True
    planes = {}
    for name, shape in plane_shapes(spec).items():
        values = torch.randn(num_pages, spec.page_size, *shape, generator=noise)
        dtype = spec.plane_dtype
        if dtype.itemsize > 1:
            planes[name] = values.masked_fill(~used[(..., *[None] * len(shape))], torch.nan).to(
                dtype
            )
            continue
        largest = FLOAT8_MAX.get(dtype, 127.0)
        scale = values.abs().amax(-1) / largest
        quantized = values / scale[..., None]
        rounded = quantized.round() if dtype == torch.int8 else quantized
        planes[name] = rounded.to(dtype)
        unused = ~used[(..., *[None] * (len(shape) - 1))]
        planes[f"{name}_scale"] = scale.masked_fill(unused, torch.nan)
    return planes


def step_of(
    spec: AttentionSpec,
    shares: list[tuple[int, int]],
    *,
    seed: int = 0,
    num_selected: int = 20,
    rows: list[list[int]] | None = None,
    sharing: list[tuple[int, int]] | None = None,
) -> Step:
    """A batch of (cached, new) requests; `rows` are their pages, `sharing` as in `build`."""
    noise = torch.Generator().manual_seed(seed)
    lengths = [cached + new for cached, new in shares]
    if rows is None:
        rows = pages_of(lengths, spec.page_size, noise)
    planes = planes_of(spec, rows, lengths, noise)
    batch = batch_of(spec, shares, rows, sharing)
    q = torch.randn(batch.num_tokens, spec.num_heads, spec.head_dim, generator=noise)
    selected = None
    if spec.sparse:
        selected = torch.full((batch.num_tokens, num_selected), -1, dtype=torch.int32)
        for row, position in enumerate(batch.positions.tolist()):
            keys = torch.randperm(position + 1, generator=noise)[:num_selected].sort().values
            selected[row, : len(keys)] = keys.int()
    return Step(batch, q.to(spec.dtype), planes, selected, sinks_of(spec))


def batch_of(
    spec: AttentionSpec,
    shares: list[tuple[int, int]],
    rows: list[list[int]],
    sharing: list[tuple[int, int]] | None = None,
) -> AttentionBatch:
    table = PagedBlockTable.of(rows, spec.page_size)
    extends = [Extend(i, i, cached, new) for i, (cached, new) in enumerate(shares)]
    return AttentionBatch.build(extends, table, sharing or ())


def triton(spec: AttentionSpec, *, split: bool = True, tiles: TileShapes = TILES) -> TritonBackend:
    """A Triton backend with small tiles that always, or never, splits the keys of decodes."""
    return TritonBackend(spec, CPU, tiles=tiles, saturating_programs=1 << 20 if split else 0)


def sinks_of(spec: AttentionSpec) -> Tensor | None:
    """A sink for each head: usual, without weight, with nearly all of it, with all of it."""
    if not spec.sinks:
        return None
    return torch.tensor([0.5, -200.0, 20.0, 300.0]).repeat(spec.num_heads)[: spec.num_heads]


def run(backend: AttentionBackend, step: Step, *, padding: int = 0, layer: int = 0) -> Tensor:
    rows = torch.cat([step.q, step.q.new_full((padding, *step.q.shape[1:]), 7.0)])
    planes, selected = step.planes, step.selected
    if selected is not None:
        selected = torch.cat([selected, selected.new_full((padding, selected.shape[1]), -1)])
    plan = backend.plan(step.batch)
    return backend.run(plan, layer, rows, planes, selected=selected, sinks=step.sinks)


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    bits = {2: torch.int16, 4: torch.int32}[actual.dtype.itemsize]
    different = (actual.contiguous().view(bits) != expected.contiguous().view(bits)).sum()
    assert int(different) == 0, f"{int(different)} of {actual.numel()} values differ"
    assert not actual.isnan().any()


def sharing_rows(
    lengths: list[int], shared: list[tuple[int, int]], page_size: int
) -> list[list[int]]:
    """Scattered pages; a request has the first pages of an earlier request in common."""
    noise = torch.Generator().manual_seed(len(lengths))
    rows = pages_of(lengths, page_size, noise)
    for seq, (other, length) in enumerate(shared):
        num_shared = length // page_size if other >= 0 else 0
        rows[seq][:num_shared] = rows[other][:num_shared]
    return rows
