"""Both paths of latent attention against attention in float64 over keys that are all recomputed."""

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ramify.attention import mla
from ramify.attention.backends.eager import EagerBackend
from ramify.attention.batch import AttentionBatch, Extend
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
# (cached, new): first chunks, later chunks, decode, across and at the borders of chunks of 16
SHARES = ((0, 5), (37, 1), (16, 16), (15, 2), (40, 9), (0, 33), (1, 1), (31, 1))
SPREADING = MlaCostModel(0.0, 1.0, 0.0, 0.0)  # expanding is always cheaper
KEEPING = MlaCostModel(0.0, 0.0, 1.0, 1.0)


@dataclass(frozen=True)
class Case:
    """A batch over scattered pages; every slot that is no request's token holds NaN."""

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
        own = random(cached + new, latent_dim), random(cached + new, rope_dim)
        for plane, values in zip(planes.values(), own, strict=True):
            plane.flatten(0, 1)[torch.from_numpy(batch.kv_slots(seq))] = values
        latents.append(own)
    keys, values = random(num_heads, nope_dim, latent_dim), random(num_heads, latent_dim, value_dim)
    keys, values = keys / math.sqrt(latent_dim), values / math.sqrt(latent_dim)
    up = UpProjection(
        keys, values, lambda x: per_head_matmul(x, keys), lambda x: per_head_matmul(x, values)
    )
    num_rows = batch.num_tokens + 3  # padding
    query = MlaQuery(
        random(num_rows, num_heads, nope_dim), random(num_rows, num_heads, rope_dim), up
    )
    return Case(AttentionSpec(**(settings | changes)), batch, query, planes, latents)


def recomputed(case: Case) -> Tensor:
    """[T, num_heads, value_dim] float64: keys and values of every head from every latent."""
    query, batch = case.query, case.batch
    found = []
    for seq, (latent, rope) in enumerate(case.latents):
        rows = slice(int(batch.cu_seqlens_q[seq]), int(batch.cu_seqlens_q[seq + 1]))
        keys = torch.einsum("nl,hdl->hnd", latent.double(), query.up.w_uk.double())
        values = torch.einsum("nl,hlv->hnv", latent.double(), query.up.w_uv.double())
        scores = torch.einsum("thd,hnd->htn", query.q_nope[rows].double(), keys)
        scores += torch.einsum("thr,nr->htn", query.q_rope[rows].double(), rope.double())
        at = torch.arange(len(latent) - (rows.stop - rows.start), len(latent))
        unseen = torch.arange(len(latent)) > at[:, None]
        weights = (scores * case.spec.scale).masked_fill(unseen, -torch.inf).softmax(-1)
        found.append(torch.einsum("htn,hnv->thv", weights, values))
    return torch.cat(found)


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

    found = run(case, path=path, chunk_keys=16)

    num_tokens = case.batch.num_tokens
    assert found.shape == (num_tokens + 3, 3, value_dim)
    assert not found[num_tokens:].any()
    assert float((found[:num_tokens].double() - recomputed(case)).abs().max()) < 2e-5


@pytest.mark.parametrize("path", ["absorbed", "expanded"])
def test_ab4_exact_is_absorbed_or_refused(path: MlaPath) -> None:
    """Exact expanded attention does not exist; exact absorbed attention is right."""
    case = case_of(exact=True)

    if path == "expanded":
        with pytest.raises(ConfigError, match="exact=True: its bits differ"):
            run(case, path=path)
    else:
        found = run(case, path=path)
        assert torch.equal(found, run(case))
        num_tokens = case.batch.num_tokens
        assert float((found[:num_tokens].double() - recomputed(case)).abs().max()) < 2e-5


@pytest.mark.parametrize("path", ["absorbed", "expanded"])
def test_bfloat16_is_within_its_rounding(path: MlaPath) -> None:
    """Outputs of the order of 1 are off by less than 0.05."""
    case = case_of(dtype=torch.bfloat16)

    found = run(case, path=path, chunk_keys=16)[: case.batch.num_tokens]

    assert found.dtype == torch.bfloat16
    assert float((found.double() - recomputed(case)).abs().max()) < 0.05


@pytest.mark.parametrize("chunk_keys", [1, 7, 16, 64, 512])
def test_chunks_of_any_length_agree(chunk_keys: int) -> None:
    """Chunks begin at multiples of their length from position 0, whatever is cached."""
    case = case_of()

    found = run(case, path="expanded", chunk_keys=chunk_keys)[: case.batch.num_tokens]

    assert float((found.double() - recomputed(case)).abs().max()) < 2e-5


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


def test_long_chunks_of_queries_are_taken_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores in flight have a limit too; the answer does not depend on it."""
    case = case_of()
    whole = run(case, path="expanded", chunk_keys=16)

    monkeypatch.setattr(mla, "MAX_SCORES", 100)

    torch.testing.assert_close(run(case, path="expanded", chunk_keys=16), whole)


@pytest.mark.parametrize("cut", [0, 1, 5, 11, 12])
def test_merging_by_log_sum_exp_is_attention_over_both_parts(cut: int) -> None:
    """Wherever the keys are cut, also where a part or a row sees nothing."""
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
    """Expanding pays where many queries share the price of the keys, and never for one query."""
    costs = MlaCostModel(
        absorbed_row=0.0,
        absorbed_pair=3.0,
        expanded_key=31.0,
        expanded_pair=1.0,
    )
    case = case_of(shares=((10, 1), (10, 14), (0, 16), (90, 15)))

    plan = attention_of(case, costs=costs).plan(case.batch)

    assert [span.stop - span.start for span in plan.expanded] == [16]
    assert plan.absorbed_rows is not None
    assert plan.absorbed_rows.tolist() == [*range(15), *range(31, 46)]
    assert attention_of(case, costs=KEEPING).plan(case.batch).expanded == []
    spread = attention_of(case, costs=SPREADING).plan(case.batch).expanded
    assert [span.stop - span.start for span in spread] == [14, 16, 15]
    mixed = run(case, costs=costs)[: case.batch.num_tokens]
    assert float((mixed.double() - recomputed(case)).abs().max()) < 2e-5


def test_costs_are_measured_when_asked_for_and_once() -> None:
    """Four figures of seconds; a step of decoding alone asks for none."""
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
def test_what_the_expanded_path_does_not_know_is_refused_or_absorbed(
    changes: dict[str, Any], message: str
) -> None:
    """Asked for it raises; by cost alone the absorbed path is taken, however dear."""
    case = case_of(**changes)
    with pytest.raises(ConfigError, match=message):
        attention_of(case, path="expanded")

    plan = attention_of(case, costs=SPREADING).plan(case.batch)

    assert plan.expanded == []


def test_misuse_is_refused() -> None:
    """Another kind of attention, an index without sparseness and the reverse, no chunk."""
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
    """With an index that keeps all it is dense attention; one that keeps 4 gives another answer."""
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

    found = {
        top_k: run(
            case,
            index=SparseIndex(top_k=top_k, num_heads=2, head_dim=8, device=CPU, exact=False),
        )
        for top_k in (4, 64)
    }

    errors = {
        k: (out[: case.batch.num_tokens].double() - recomputed(case)).abs().amax((1, 2))
        for k, out in found.items()
    }
    assert float(errors[64].max()) < 2e-5
    few = torch.from_numpy(case.batch.positions < 4)
    assert float(errors[4][few].max()) < 2e-5
    assert float(errors[4][~few].min()) > 1e-3
