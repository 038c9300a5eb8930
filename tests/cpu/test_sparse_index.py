"""The sparse index scores every visible key, cached or new, and no later key."""

from dataclasses import dataclass
from itertools import product

import pytest
import torch
from torch import Tensor

from ramify.attention.batch import AttentionBatch, Extend
from ramify.attention.exactness import ProbeStore
from ramify.attention.sparse_index import IndexQuery, SparseIndex, topk_mask
from ramify.errors import ConfigError
from ramify.kv.block_table import PagedBlockTable

CPU = torch.device("cpu")
HEADS, DIM = 3, 8
SHARES = ((0, 5), (37, 1), (300, 3), (255, 2), (0, 70), (511, 1), (1, 1), (20, 90))


@dataclass(frozen=True)
class Case:
    """Index keys of requests on scattered pages; every other slot is NaN."""

    shares: tuple[tuple[int, int], ...]
    batch: AttentionBatch
    query: IndexQuery  # with three rows of padding
    planes: dict[str, Tensor]
    keys: list[Tensor]  # [kv_len, DIM] per request


def batch_of(
    shares: tuple[tuple[int, int], ...], page_size: int, noise: torch.Generator
) -> AttentionBatch:
    counts = [-(-(cached + new) // page_size) for cached, new in shares]
    pages = torch.randperm(sum(counts), generator=noise).tolist()
    rows = [[pages.pop() for _ in range(count)] for count in counts]
    extends = [Extend(i, i, cached, new) for i, (cached, new) in enumerate(shares)]
    return AttentionBatch.build(extends, PagedBlockTable.of(rows, page_size))


def case_of(
    shares: tuple[tuple[int, int], ...] = SHARES, *, page_size: int = 4, integers: bool = False
) -> Case:
    """`integers` makes the scores small integers: many ties, and no rounding."""
    noise = torch.Generator().manual_seed(page_size)
    batch = batch_of(shares, page_size, noise)

    def random(*shape: int) -> Tensor:
        drawn = torch.randn(shape, generator=noise)
        return drawn.sign() if integers else drawn

    num_pages = sum(-(-(cached + new) // page_size) for cached, new in shares)
    plane = torch.full((num_pages + 1, page_size, DIM), torch.nan)
    keys = [random(cached + new, DIM) for cached, new in shares]
    for seq, seq_keys in enumerate(keys):
        plane.flatten(0, 1)[torch.from_numpy(batch.kv_slots(seq))] = seq_keys
    rows = batch.num_tokens + 3
    query = IndexQuery(random(rows, HEADS, DIM), random(rows, HEADS))
    return Case(shares, batch, query, {"index_key": plane}, keys)


def index_of(top_k: int, *, exact: bool = True) -> SparseIndex:
    return SparseIndex(
        top_k=top_k,
        num_heads=HEADS,
        head_dim=DIM,
        device=CPU,
        exact=exact,
        store=ProbeStore(None),
    )


def select(case: Case, top_k: int, *, exact: bool = True) -> Tensor:
    index = index_of(top_k, exact=exact)
    return index.select(index.plan(case.batch), case.query, case.planes)


def reference_selection(case: Case, top_k: int) -> list[list[int]]:
    """Per query the best positions up to its own, ties to the lowest; sorted in Python."""
    selected, row = [], 0
    for (cached, new), keys in zip(case.shares, case.keys, strict=True):
        for local in range(new):
            q, weights = case.query.q[row].double(), case.query.weights[row].double()
            visible = keys[: cached + local + 1].double()
            scores = ((visible @ q.T).relu() @ weights).tolist()
            order = sorted(range(len(scores)), key=lambda position: (-scores[position], position))
            selected.append(sorted(order[:top_k]))
            row += 1
    return selected


def as_lists(selected: Tensor) -> list[list[int]]:
    return [[position for position in row if position >= 0] for row in selected.tolist()]


def visible_slots(batch: AttentionBatch) -> list[list[int]]:
    """Per query the slots of the keys that the index scores, as it plans them."""
    return [
        tile.slots[:count].tolist()
        for tile in index_of(1, exact=False).plan(batch).tiles
        for count in tile.num_visible.tolist()
    ]


def test_ab5_key_ranges_include_cached_keys_and_no_later_key() -> None:
    """(cached 4, new 3) and (0, 2): the queries see 5, 6, 7, 1, 2 keys of their own request."""
    batch = batch_of(((4, 3), (0, 2)), 4, torch.Generator())

    visible = visible_slots(batch)

    assert list(map(len, visible)) == [5, 6, 7, 1, 2]
    assert visible[2] == batch.kv_slots(0).tolist()
    assert visible[4] == batch.kv_slots(1).tolist()


def test_ab5_key_ranges_of_every_small_batch() -> None:
    """Against a loop, for every pair of (cached, new) up to 4 cached and 3 new tokens."""
    grid = [(cached, new) for cached in range(5) for new in range(1, 4)]

    for shares in list(product(grid, repeat=2)):
        batch = batch_of(shares, 2, torch.Generator())
        expected = [
            batch.kv_slots(seq)[: cached + local + 1].tolist()
            for seq, (cached, new) in enumerate(shares)
            for local in range(new)
        ]
        assert visible_slots(batch) == expected, shares


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "fast"])
@pytest.mark.parametrize("top_k", [1, 7, 64, 1000])
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_the_best_keys_are_selected(page_size: int, top_k: int, exact: bool) -> None:
    """Ascending, then -1; all -1 for padding rows; at most all visible keys."""
    case = case_of(page_size=page_size)

    selected = select(case, top_k, exact=exact)

    assert selected.dtype == torch.int32
    assert selected.shape == (case.batch.num_tokens + 3, min(top_k, 512))
    assert (selected[case.batch.num_tokens :] == -1).all()
    assert as_lists(selected)[: case.batch.num_tokens] == reference_selection(case, top_k)
    for row in selected.tolist():
        count = sum(position >= 0 for position in row)
        assert row[count:] == [-1] * (len(row) - count)


@pytest.mark.parametrize("top_k", [1, 5, 33])
def test_equal_scores_go_to_the_lowest_position(top_k: int) -> None:
    """Scores are small integers, with many ties."""
    case = case_of(integers=True)

    selected = as_lists(select(case, top_k))[: case.batch.num_tokens]

    assert selected == reference_selection(case, top_k)


def test_ab5_later_tokens_of_the_step_are_not_visible() -> None:
    """A chunk's queries select the same when all later keys of the chunk are enormous."""
    case = case_of(((300, 9),))
    before = select(case, 16)
    slots = torch.from_numpy(case.batch.kv_slots(0))

    for row in range(9):
        changed = case.planes["index_key"].clone()
        changed.flatten(0, 1)[slots[301 + row :]] = 1e6
        index = index_of(16)
        selected = index.select(index.plan(case.batch), case.query, {"index_key": changed})
        assert torch.equal(selected[: row + 1], before[: row + 1])


@pytest.mark.parametrize("cached", [0, 1, 250, 299])
def test_what_is_cached_or_who_is_beside_changes_no_choice(cached: int) -> None:
    """One chunk, two chunks, and a batch: each query selects as when it came alone."""
    whole = case_of(((0, 300), (40, 5)))
    expected = select(whole, 11)[:300]
    spans = [(0, cached), (cached, 300)] if cached else [(0, 300)]
    table = PagedBlockTable.of([whole.batch.block_table[0].tolist()], 4)

    for start, stop in spans:
        batch = AttentionBatch.build([Extend(0, 0, start, stop - start)], table)
        query = IndexQuery(whole.query.q[start:stop], whole.query.weights[start:stop])
        index = index_of(11)
        selected = index.select(index.plan(batch), query, whole.planes)
        assert torch.equal(selected[:, : min(11, stop)], expected[start:stop, : min(11, stop)])


def test_scores_have_the_same_bits_however_rows_are_grouped() -> None:
    """Any rows of a tile by themselves score every key as among all rows."""
    noise = torch.Generator().manual_seed(0)
    q, weights = torch.randn(64, HEADS, DIM, generator=noise), torch.randn(64, HEADS)
    keys = torch.randn(512, DIM, generator=noise)
    index = index_of(4)
    whole = index._scores(q, weights, keys)

    for start, stop in ((0, 1), (3, 4), (5, 12), (7, 23), (0, 63), (31, 64)):
        part = index._scores(q[start:stop], weights[start:stop], keys)
        assert torch.equal(part, whole[start:stop])
        assert torch.equal(
            index._scores(q[start:stop], weights[start:stop], keys[:256]), part[:, :256]
        )


def test_topk_mask_ignores_masked_keys() -> None:
    """NaN and infinity of recycled pages are not selected; fewer visible than `count`: all."""
    scores = torch.tensor([[1.0, torch.nan, 3.0, torch.inf], [2.0, 2.0, 2.0, 2.0]])
    visible = torch.tensor([[True, False, True, False], [True, True, True, True]])

    assert topk_mask(scores, visible, 3).tolist() == [
        [True, False, True, False],
        [True, True, True, False],
    ]
    assert topk_mask(scores, visible, 9).tolist() == visible.tolist()


def test_an_empty_batch_selects_nothing() -> None:
    """No query, no key, no column."""
    batch = batch_of((), 4, torch.Generator())
    index = index_of(4)

    selected = index.select(
        index.plan(batch), IndexQuery(torch.zeros(0, HEADS, DIM), torch.zeros(0, HEADS)), {}
    )

    assert selected.shape == (0, 0)


def test_sizes_below_one_are_refused() -> None:
    """The message has all three sizes."""
    with pytest.raises(ConfigError, match="top_k=0"):
        index_of(0)
