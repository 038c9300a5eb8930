"""The sparse index over pages, its kernel interpreted: the selection of torch's, and bits of a row alone."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ramify.attention.batch import AttentionBatch, Extend
from ramify.attention.device_probe import batch_variant_scores
from ramify.attention.paged_index import PagedIndex, PagedIndexPlan
from ramify.attention.sparse_index import IndexQuery
from ramify.engine.execution.decode_sources import padded_batch
from ramify.kv.block_table import PagedBlockTable
from ramify.kv.layout import Plane
from ramify.kv.pool import KVLayout, KVPool
from tests.cpu.attention_cases import assert_same_bits, spec_of
from tests.cpu.recorded_graphs import RecordedStep
from tests.cpu.test_sparse_index import DIM, HEADS, Case, as_lists, case_of, reference_selection

pytest.importorskip("triton", reason="the interpreter of Triton's kernels comes with triton")

CPU = torch.device("cpu")
# The last is not scored alone: it has one key to select from.
FEW = ((0, 7), (5, 1), (133, 20), (290, 3), (0, 1))


def index_of(top_k: int, *, page_size: int = 4) -> PagedIndex:
    return PagedIndex(top_k=top_k, num_heads=HEADS, head_dim=DIM, device=CPU, page_size=page_size)


def select(case: Case, top_k: int, *, page_size: int = 4) -> Tensor:
    index = index_of(top_k, page_size=page_size)
    return index.select(index.plan(case.batch), case.query, case.planes)


@pytest.mark.parametrize(("page_size", "top_k"), [(3, 1), (1, 7), (16, 64), (4, 1000)])
def test_the_best_keys_are_selected(page_size: int, top_k: int) -> None:
    """Prefills, chunks and decodes on scattered pages: ascending, then -1; padding rows are all -1."""
    case = case_of(page_size=page_size)

    selected = select(case, top_k, page_size=page_size)

    num_tokens = case.batch.num_tokens
    assert selected.dtype == torch.int32
    assert selected.shape == (num_tokens + 3, min(top_k, 512))
    assert (selected[num_tokens:] == -1).all()
    assert as_lists(selected)[:num_tokens] == reference_selection(case, top_k)
    for row in selected.tolist():
        count = sum(position >= 0 for position in row)
        assert row[count:] == [-1] * (len(row) - count)


def test_equal_scores_go_to_the_lowest_position() -> None:
    """Scores are small integers, with many ties."""
    case = case_of(integers=True)

    selected = as_lists(select(case, 5))[: case.batch.num_tokens]

    assert selected == reference_selection(case, 5)


def test_rows_are_scored_in_groups_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for the scores of 20 rows the selection is the same."""
    case = case_of()
    expected = select(case, 7)
    monkeypatch.setattr("ramify.attention.paged_index.MAX_SCORES", 20 * 512)

    plan = index_of(7).plan(case.batch)

    sizes = [group.stop - group.start for group in plan.groups]
    assert max(sizes) <= 20 and sum(sizes) == case.batch.num_tokens
    assert torch.equal(select(case, 7), expected)


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_scores_have_the_same_bits_alone_in_chunks_and_in_a_batch(kv_dtype: torch.dtype) -> None:
    """The probe of a device finds nothing, and finds what depends on the number of rows."""
    dtype = torch.float32 if kv_dtype == torch.float32 else torch.bfloat16
    spec = spec_of(dtype=dtype, kv_dtype=kv_dtype, page_size=8)
    index = index_of(3, page_size=8)

    assert batch_variant_scores(index, spec, FEW) == []


def test_the_probe_finds_scores_that_depend_on_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """An index whose scores depend on the number of rows."""
    compute = PagedIndex.scores
    monkeypatch.setattr(
        PagedIndex,
        "scores",
        lambda self, plan, *rest: compute(self, plan, *rest) * (1 + 2**-20 * plan.num_rows),
    )

    assert batch_variant_scores(index_of(3, page_size=8), spec_of(), FEW) == [0, 1, 2, 3]


@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_quantised_keys_are_scored_with_their_scales(kv_dtype: torch.dtype) -> None:
    """Against float64 over the dequantised keys."""
    noise = torch.Generator().manual_seed(3)
    pool = KVPool(KVLayout(1, (Plane("index_key", (DIM,)),)), 12, 4, dtype=kv_dtype)
    slots = torch.randperm(48, generator=noise)
    pool.write_kv(0, slots, index_key=torch.randn(48, DIM, generator=noise))
    table = PagedBlockTable.of([[7, 2, 9, 4, 11]], 4)
    batch = AttentionBatch.build([Extend(0, 0, 13, 6)], table)
    query = IndexQuery(
        torch.randn(6, HEADS, DIM, generator=noise), torch.randn(6, HEADS, generator=noise)
    )
    index = index_of(2)
    plan = index.plan(batch)

    scores = index.scores(plan, plan.groups[0], query, pool.planes(0))

    keys = pool.gather_kv(0, torch.from_numpy(batch.kv_slots(0)))["index_key"].double()
    by_head = torch.einsum("thd,nd->thn", query.q.double(), keys).relu()
    expected = (by_head * query.weights[:, :, None].double()).sum(1)
    visible = torch.arange(19) <= torch.arange(13, 19)[:, None]
    assert float((scores[:, :19].double() - expected)[visible].abs().max()) < 1e-5
    assert (scores[:, :19][~visible] == -torch.inf).all()


def test_a_signature_stays_while_a_graph_of_the_step_holds() -> None:
    """The next tokens of the same requests have the same groups, width and addresses."""
    index = index_of(3)
    rows = [list(range(40)), list(range(40, 80))]
    table = PagedBlockTable.of(rows, 4)

    def planned(cached: int) -> tuple[object, list[int]]:
        plan = index.plan(
            AttentionBatch.build([Extend(0, 0, cached, 1), Extend(1, 1, cached - 5, 1)], table)
        )
        return plan.signature, [array.data_ptr() for array in plan.arrays.values()]

    planned(159)  # the largest step first, as for a CUDA graph
    plans = [planned(cached) for cached in (140, 141, 150)]

    assert plans[0] == plans[1] == plans[2]
    assert planned(100)[0] != plans[0][0]


@pytest.mark.parametrize("longest", [300, 6], ids=["scored", "all keys"])
def test_a_graph_holds_for_every_number_of_rows_of_its_bucket(longest: int) -> None:
    """Captured with five requests and replayed with six to eight: one signature, nothing that is frozen differs."""
    lengths = (longest, 2, 5, 4, 3, 1, 5, 2)
    case, top_k, bucket = case_of(tuple((cached, 1) for cached in lengths)), 7, 8
    padding_page = len(case.planes["index_key"]) - 1
    query = IndexQuery(*(x[:bucket].contiguous() for x in (case.query.q, case.query.weights)))
    expected, index = reference_selection(case, top_k), index_of(top_k)

    def planned(count: int) -> PagedIndexPlan:
        batch = case.batch.select(range(count))
        return index.plan(padded_batch(batch, bucket, padding_page))

    plans = [planned(5)]
    captured = RecordedStep(lambda: (index.select(plans[-1], query, case.planes),))

    for count in (5, 6, 8, 7):
        plans.append(planned(count))
        assert plans[-1].signature == plans[0].signature
        [selected] = captured.replay()
        assert as_lists(selected)[:count] == expected[:count]


def test_an_empty_batch_selects_nothing() -> None:
    """No query, no key."""
    case = case_of(())
    index = index_of(4)

    selected = index.select(index.plan(case.batch), replace(case.query, q=case.query.q[:0]), {})

    assert len(selected) == 0


def test_keys_that_no_row_sees_change_no_score() -> None:
    """A later token of the step may be anything, NaN included."""
    case = case_of(((140, 3),))
    index = index_of(2)
    plan = index.plan(case.batch)
    before = index.scores(plan, plan.groups[0], case.query, case.planes)
    keys = case.planes["index_key"].clone()
    keys.flatten(0, 1)[int(case.batch.kv_slots(0)[-1])] = torch.nan

    after = index.scores(plan, plan.groups[0], case.query, {"index_key": keys})

    assert_same_bits(after[:2], before[:2])
