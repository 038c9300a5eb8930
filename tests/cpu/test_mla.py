"""Both paths of MLA against attention in float64 over recomputed keys and values."""

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ramify.attention import mla
from ramify.attention.backend import backend_class
from ramify.attention.backends.eager import EagerBackend
from ramify.attention.batch import AttentionBatch, Extend
from ramify.attention.expanded_heads import ExpandedHeads
from ramify.attention.mla import (
    MlaAttention,
    MlaCostModel,
    MlaPath,
    MlaQuery,
    UpProjection,
    block_attention_lse,
    merge_state,
)
from ramify.attention.sparse_index import IndexQuery, SparseIndex
from ramify.attention.spec import AttentionSpec
from ramify.errors import ConfigError
from ramify.kv.block_table import PagedBlockTable
from ramify.models.ops.functional import per_head_matmul

CPU = torch.device("cpu")
# (cached, new): first chunks, later chunks, decode, across and at the edges of chunks of 16
SHARES = ((0, 5), (37, 1), (16, 16), (15, 2), (40, 9), (0, 33), (1, 1), (31, 1))
EXPANDED_IS_FREE = MlaCostModel(0.0, 1.0, 0.0, 0.0)
ABSORBED_IS_FREE = MlaCostModel(0.0, 0.0, 1.0, 1.0)


@dataclass(frozen=True)
class Case:
    """A batch over scattered pages; every slot without a request's token is NaN."""

    spec: AttentionSpec
    batch: AttentionBatch
    query: MlaQuery
    planes: dict[str, Tensor]
    latents: list[tuple[Tensor, Tensor]]  # per request: latent and rope, [kv_len, width]


def case_of(
    *,
    nope_dim: int = 10,
    value_dim: int = 12,
    page_size: int = 4,
    dtype: torch.dtype = torch.float32,
    shares: tuple[tuple[int, int], ...] = SHARES,
    **changes: Any,
) -> Case:
    noise = torch.Generator().manual_seed(nope_dim * 100 + value_dim)
    num_heads, latent_dim, rope_dim = 3, 20, 6

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=noise).to(dtype)

    settings: dict[str, Any] = {
        "num_heads": num_heads,
        "num_kv_heads": 1,
        "head_dim": latent_dim + rope_dim,
        "value_dim": latent_dim,
        "page_size": page_size,
        "dtype": dtype,
        "windows": (None,),
        "scale": 0.2,
        "exact": False,
        "kind": "mla",
    }
    counts = [-(-(cached + new) // page_size) for cached, new in shares]
    pages = torch.randperm(sum(counts) + 3, generator=noise).tolist()
    rows = [[pages.pop() for _ in range(count)] for count in counts]
    extends = [Extend(i, i, cached, new) for i, (cached, new) in enumerate(shares)]
    batch = AttentionBatch.build(extends, PagedBlockTable.of(rows, page_size))
    planes = {
        name: torch.full((sum(counts) + 4, page_size, width), torch.nan, dtype=dtype)
        for name, width in (("latent", latent_dim), ("rope", rope_dim))
    }
    latents = []
    for seq, (cached, new) in enumerate(shares):
        latent_and_rope = random(cached + new, latent_dim), random(cached + new, rope_dim)
        for plane, values in zip(planes.values(), latent_and_rope, strict=True):
            plane.flatten(0, 1)[torch.from_numpy(batch.kv_slots(seq))] = values
        latents.append(latent_and_rope)
    w_uk, w_uv = random(num_heads, nope_dim, latent_dim), random(num_heads, latent_dim, value_dim)
    w_uk, w_uv = w_uk / math.sqrt(latent_dim), w_uv / math.sqrt(latent_dim)
    up = UpProjection(
        w_uk, w_uv, lambda x: per_head_matmul(x, w_uk), lambda x: per_head_matmul(x, w_uv)
    )
    num_rows = batch.num_tokens + 3  # padding
    query = MlaQuery(
        random(num_rows, num_heads, nope_dim), random(num_rows, num_heads, rope_dim), up
    )
    return Case(AttentionSpec(**(settings | changes)), batch, query, planes, latents)


def recomputed(case: Case) -> Tensor:
    """Attention over keys and values of every head: [T, num_heads, value_dim] float64."""
    query, batch = case.query, case.batch
    outputs = []
    for seq, (latent, rope) in enumerate(case.latents):
        rows = slice(int(batch.cu_seqlens_q[seq]), int(batch.cu_seqlens_q[seq + 1]))
        keys = torch.einsum("nl,hdl->hnd", latent.double(), query.up.w_uk.double())
        values = torch.einsum("nl,hlv->hnv", latent.double(), query.up.w_uv.double())
        scores = torch.einsum("thd,hnd->htn", query.q_nope[rows].double(), keys)
        scores += torch.einsum("thr,nr->htn", query.q_rope[rows].double(), rope.double())
        positions = torch.arange(len(latent) - (rows.stop - rows.start), len(latent))
        masked = torch.arange(len(latent)) > positions[:, None]
        weights = (scores * case.spec.scale).masked_fill(masked, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("htn,hnv->thv", weights, values))
    return torch.cat(outputs)


def attention_of(case: Case, **options: Any) -> MlaAttention:
    return MlaAttention(
        EagerBackend(case.spec, CPU),
        case.spec,
        nope_dim=case.query.q_nope.shape[-1],
        value_dim=case.query.up.w_uv.shape[-1],
        **options,
    )


def run(case: Case, **options: Any) -> Tensor:
    attention = attention_of(case, **options)
    return attention.run(attention.plan(case.batch), 0, case.query, case.planes)


@pytest.mark.parametrize("path", ["absorbed", "expanded", "auto"])
@pytest.mark.parametrize(("nope_dim", "value_dim"), [(10, 12), (16, 16), (24, 5), (1, 40)])
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_ab4_every_configuration_with_a_prefix_equals_full_recompute(
    path: MlaPath, nope_dim: int, value_dim: int, page_size: int
) -> None:
    """Any widths, equal or not; any pages; cached or not; padding rows come back as zeros."""
    case = case_of(nope_dim=nope_dim, value_dim=value_dim, page_size=page_size)

    out = run(case, path=path, chunk_keys=16)

    num_tokens = case.batch.num_tokens
    assert out.shape == (num_tokens + 3, 3, value_dim)
    assert not out[num_tokens:].any()
    assert float((out[:num_tokens].double() - recomputed(case)).abs().max()) < 2e-5


@pytest.mark.parametrize("path", ["absorbed", "expanded"])
@pytest.mark.parametrize("backend", ["cpu", "triton"])
def test_every_backend_of_the_absorbed_path_agrees(backend: str, path: MlaPath) -> None:
    """Torch's operations, the compiled kernels and Triton's, and the path that uses none of them."""
    case = case_of(shares=((0, 5), (37, 1), (15, 2)))
    reason = backend_class(backend).supports(case.spec, CPU)
    if reason is not None:
        pytest.skip(reason)
    attention = attention_of(case, path=path)
    attention.backend = backend_class(backend)(case.spec, CPU)

    out = attention.run(attention.plan(case.batch), 0, case.query, case.planes)

    assert (
        float((out[: case.batch.num_tokens] - run(case, path="absorbed")[:-3]).abs().max()) < 2e-5
    )


class LatentsOfQueries:
    """In place of a backend that has no arithmetic on the meta device."""

    def plan(self, batch: AttentionBatch) -> AttentionBatch:
        return batch

    def run(
        self, plan: AttentionBatch, layer: int, q: Tensor, planes: Any, **options: Any
    ) -> Tensor:
        assert plan.num_tokens == len(q)
        return q[..., :20]


def test_a_step_stays_on_its_device() -> None:
    """Every tensor of a plan and of a run is on the device: torch refuses to mix two."""
    meta, case = torch.device("meta"), case_of(shares=((0, 5), (37, 1)))
    w_uk, w_uv = case.query.up.w_uk.to(meta), case.query.up.w_uv.to(meta)
    up = UpProjection(
        w_uk, w_uv, lambda x: per_head_matmul(x, w_uk), lambda x: per_head_matmul(x, w_uv)
    )
    query = MlaQuery(case.query.q_nope[:6].to(meta), case.query.q_rope[:6].to(meta), up)
    backend: Any = LatentsOfQueries()
    attention = MlaAttention(
        backend, case.spec, nope_dim=10, value_dim=12, costs=EXPANDED_IS_FREE, device=meta
    )

    plan = attention.plan(case.batch)
    out = attention.run(plan, 0, query, {name: x.to(meta) for name, x in case.planes.items()})

    assert out.device == meta and out.shape == (6, 3, 12)
    [request], rows = plan.expanded, plan.absorbed_rows
    assert rows is not None and rows.shape == (1,)
    assert {rows.device, request.slots.device, request.query_positions.device} == {meta}


@pytest.mark.parametrize("path", ["absorbed", "expanded"])
def test_ab4_exact_is_absorbed_or_refused(path: MlaPath) -> None:
    """Exact expanded attention does not exist; exact absorbed attention is right."""
    case = case_of(exact=True)

    if path == "expanded":
        with pytest.raises(ConfigError, match="exact=True: its bits differ"):
            run(case, path=path)
    else:
        out = run(case, path=path)
        assert torch.equal(out, run(case))
        num_tokens = case.batch.num_tokens
        assert float((out[:num_tokens].double() - recomputed(case)).abs().max()) < 2e-5


@pytest.mark.parametrize("path", ["absorbed", "expanded"])
def test_bfloat16_is_within_its_rounding(path: MlaPath) -> None:
    """Outputs of about 1 differ by less than 0.05."""
    case = case_of(dtype=torch.bfloat16)

    out = run(case, path=path, chunk_keys=16)[: case.batch.num_tokens]

    assert out.dtype == torch.bfloat16
    assert float((out.double() - recomputed(case)).abs().max()) < 0.05


@pytest.mark.parametrize("chunk_keys", [1, 7, 16, 64, 512])
def test_chunks_of_any_length_agree(chunk_keys: int) -> None:
    """Chunks begin at multiples of their length from position 0, whatever is cached."""
    case = case_of()

    out = run(case, path="expanded", chunk_keys=chunk_keys)[: case.batch.num_tokens]

    assert float((out.double() - recomputed(case)).abs().max()) < 2e-5


def test_no_more_keys_than_a_chunk_are_expanded_at_once() -> None:
    """The workspace is bounded by the chunk, not by the prefix; each key is expanded once."""
    case = case_of(shares=((100, 9), (0, 50)))
    sizes: list[int] = []

    class Counting(UpProjection):
        def expand(self, latents: Tensor) -> tuple[Tensor, Tensor]:
            sizes.append(len(latents))
            return super().expand(latents)

    up = case.query.up
    counting = Counting(up.w_uk, up.w_uv, up.absorb, up.project_v)
    run(replace(case, query=replace(case.query, up=counting)), path="expanded", chunk_keys=16)

    assert sizes == [16] * 6 + [13] + [16] * 3 + [2]


def test_many_query_rows_are_computed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of scores in flight is limited; the output does not depend on it."""
    case = case_of()
    whole = run(case, path="expanded", chunk_keys=16)

    monkeypatch.setattr(mla, "MAX_SCORES", 100)

    torch.testing.assert_close(run(case, path="expanded", chunk_keys=16), whole)


@pytest.mark.parametrize(("page_size", "max_bytes", "num_heads"), [(4, 1 << 20, 3), (3, 1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_heads_are_expanded_in_turns(
    dtype: torch.dtype, page_size: int, max_bytes: int, num_heads: int
) -> None:
    """As many at a time as fit, beside absorbed requests; padding rows come back as zeros."""
    case = case_of(page_size=page_size, dtype=dtype, nope_dim=10, value_dim=12)
    sizes: dict[str, Any] = {"nope_dim": 10, "value_dim": 12}
    heads = ExpandedHeads(EagerBackend, case.spec, **sizes, device=CPU, max_bytes=max_bytes)
    attention = attention_of(case, heads=heads, costs=EXPANDED_IS_FREE)

    plan = attention.plan(case.batch)
    out = attention.run(plan, 0, case.query, case.planes)

    assert plan.by_heads is not None and plan.absorbed_rows is not None
    assert plan.by_heads.plan.num_heads == num_heads
    assert len(plan.by_heads.rows) + len(plan.absorbed_rows) == case.batch.num_tokens
    num_tokens = case.batch.num_tokens
    assert not out[num_tokens:].any()
    error = float((out[:num_tokens].double() - recomputed(case)).abs().max())
    assert error < (2e-5 if dtype == torch.float32 else 0.06)


def test_heads_are_not_expanded_for_one_query() -> None:
    """A step of decodes is absorbed, and has the signature of the backend's plan."""
    case = case_of(shares=((10, 1), (3, 1)))
    sizes: dict[str, Any] = {"nope_dim": 10, "value_dim": 12}
    heads = ExpandedHeads(EagerBackend, case.spec, **sizes, device=CPU)

    plan = attention_of(case, heads=heads, costs=EXPANDED_IS_FREE).plan(case.batch)

    assert plan.by_heads is None and plan.absorbed_rows is None


def test_costs_of_expanding_heads_are_measured() -> None:
    """On the CPU by the sizes of the CPU."""
    case = case_of(shares=((3, 1),))
    heads = ExpandedHeads(EagerBackend, case.spec, nope_dim=10, value_dim=12, device=CPU)

    costs = attention_of(case, heads=heads).costs

    assert 0 < costs.expanded_pair < 1e-3


@pytest.mark.parametrize("cut", [0, 1, 5, 11, 12])
def test_merging_by_log_sum_exp_is_attention_over_both_parts(cut: int) -> None:
    """Wherever the keys are split, also if a part or a row sees no key."""
    noise = torch.Generator().manual_seed(cut)
    scores, values = torch.randn(2, 4, 12, generator=noise), torch.randn(2, 12, 3, generator=noise)
    scores[:, 1, :5] = -torch.inf
    scores[:, 2, 5:] = -torch.inf
    whole, whole_lse = block_attention_lse(scores, values)
    left = scores.clone()
    left[..., cut:] = -torch.inf
    right = scores.clone()
    right[..., :cut] = -torch.inf

    out, lse = merge_state(*block_attention_lse(left, values), *block_attention_lse(right, values))

    torch.testing.assert_close(out, whole)
    torch.testing.assert_close(lse, whole_lse)
    torch.testing.assert_close(whole, scores.softmax(-1) @ values)
    torch.testing.assert_close(whole_lse, scores.logsumexp(-1, keepdim=True))


def test_costs_choose_the_path_of_each_request() -> None:
    """Expanding is cheaper if many queries share its cost, and never used for one query."""
    costs = MlaCostModel(
        absorbed_row=0.0,
        absorbed_pair=3.0,
        expanded_key=31.0,
        expanded_pair=1.0,
    )
    case = case_of(shares=((10, 1), (10, 14), (0, 16), (90, 15)))

    plan = attention_of(case, costs=costs).plan(case.batch)

    assert [request.stop - request.start for request in plan.expanded] == [16]
    assert plan.absorbed_rows is not None
    assert plan.absorbed_rows.tolist() == [*range(15), *range(31, 46)]
    assert attention_of(case, costs=ABSORBED_IS_FREE).plan(case.batch).expanded == []
    expanded = attention_of(case, costs=EXPANDED_IS_FREE).plan(case.batch).expanded
    assert [request.stop - request.start for request in expanded] == [14, 16, 15]
    out = run(case, costs=costs)[: case.batch.num_tokens]
    assert float((out.double() - recomputed(case)).abs().max()) < 2e-5


def test_costs_are_measured_on_first_use_and_once() -> None:
    """Seconds per unit of work; a step of decodes alone needs none."""
    case = case_of(shares=((10, 1), (3, 1)))
    attention = attention_of(case)
    attention.plan(case.batch)
    assert attention._costs is None

    costs = attention.costs

    assert attention.costs is costs
    assert costs.absorbed_row > 0
    assert costs.expanded_key > 0
    assert max(costs.absorbed_pair, costs.expanded_pair) < 1e-3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"soft_cap": 5.0}, "soft_cap=5.0"),
        ({"windows": (7,)}, "it knows no window"),
    ],
)
def test_unsupported_by_the_expanded_path_is_an_error_or_absorbed(
    changes: dict[str, Any], message: str
) -> None:
    """`path="expanded"` raises; `auto` takes the absorbed path, whatever it costs."""
    case = case_of(**changes)
    with pytest.raises(ConfigError, match=message):
        attention_of(case, path="expanded")

    plan = attention_of(case, costs=EXPANDED_IS_FREE).plan(case.batch)

    assert plan.expanded == []


def test_misuse_is_refused() -> None:
    """Wrong kind, index without sparse, sparse without index, an empty chunk."""
    case = case_of()
    index = SparseIndex(top_k=4, num_heads=2, head_dim=8, device=CPU, exact=False)
    plain = AttentionSpec(
        num_heads=2,
        num_kv_heads=2,
        head_dim=8,
        page_size=4,
        dtype=torch.float32,
        windows=(None,),
        scale=1.0,
    )
    with pytest.raises(ConfigError, match="kind='mha'"):
        MlaAttention(EagerBackend(plain, CPU), plain, nope_dim=8, value_dim=8)
    with pytest.raises(ConfigError, match="sparse=False but index is"):
        attention_of(case, index=index)
    with pytest.raises(ConfigError, match="sparse=True but index is None"):
        attention_of(case_of(sparse=True))
    with pytest.raises(ConfigError, match="chunk_keys=0"):
        attention_of(case, chunk_keys=0)


def test_sparse_attention_reads_what_the_index_selects() -> None:
    """An index of all keys gives dense attention; top_k=4 differs at later positions."""
    case = case_of(sparse=True)
    noise = torch.Generator().manual_seed(0)
    num_rows = len(case.query.q_nope)
    query = replace(
        case.query,
        index=IndexQuery(
            torch.randn(num_rows, 2, 8, generator=noise), torch.rand(num_rows, 2, generator=noise)
        ),
    )
    keys = torch.randn(*case.planes["latent"].shape[:2], 8, generator=noise)
    case = replace(case, query=query, planes=case.planes | {"index_key": keys})

    outputs = {
        top_k: run(
            case,
            index=SparseIndex(top_k=top_k, num_heads=2, head_dim=8, device=CPU, exact=False),
        )
        for top_k in (4, 64)
    }

    errors = {
        k: (out[: case.batch.num_tokens].double() - recomputed(case)).abs().amax((1, 2))
        for k, out in outputs.items()
    }
    assert float(errors[64].max()) < 2e-5
    few = torch.from_numpy(case.batch.positions < 4)
    assert float(errors[4][few].max()) < 2e-5
    assert float(errors[4][~few].min()) > 1e-3
