"""The sparse index scores every key that a query may see, cached or not, and none beyond."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from ramify.attention.batch import AttentionBatch, Extend
from ramify.attention.exactness import ProbeStore
from ramify.attention.sparse_index import IndexQuery, SparseIndex, causal_key_ranges, topk_mask
from ramify.errors import ConfigError
from ramify.kv.block_table import PagedBlockTable

CPU = torch.device("cpu")
HEADS, DIM = 3, 8
SHARES = ((0, 5), (37, 1), (300, 3), (255, 2), (0, 70), (511, 1), (1, 1), (20, 90))


@dataclass(frozen=True)
class Case:
    """Index keys of some requests on scattered pages, NaN wherever there is no key."""

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
    shares: tuple[tuple[int, int], ...] = SHARES, *, page_size: int = 4, whole: bool = False
) -> Case:
    """`whole` makes scores of small integers: many are equal, and all are exact."""
    noise = torch.Generator().manual_seed(page_size)
    batch = batch_of(shares, page_size, noise)

    def random(*shape: int) -> Tensor:
        drawn = torch.randn(shape, generator=noise)
        return drawn.sign() if whole else drawn

    num_pages = sum(-(-(cached + new) // page_size) for cached, new in shares)
    plane = torch.full((num_pages + 1, page_size, DIM), torch.nan)
    keys = [random(cached + new, DIM) for cached, new in shares]
    for seq, own in enumerate(keys):
        plane.flatten(0, 1)[torch.from_numpy(batch.kv_slots(seq))] = own
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


def chosen_by_hand(case: Case, top_k: int) -> list[list[int]]:
    """Per query the best positions up to its own, the lowest first among equals; no tensors."""
    found, row = [], 0
    for (cached, new), keys in zip(case.shares, case.keys, strict=True):
        for local in range(new):
            q, weights = case.query.q[row].double(), case.query.weights[row].double()
            visible = keys[: cached + local + 1].double()
            scores = ((visible @ q.T).relu() @ weights).tolist()
            order = sorted(range(len(scores)), key=lambda at: (-scores[at], at))
            found.append(sorted(order[:top_k]))
            row += 1
    return found


def as_lists(selected: Tensor) -> list[list[int]]:
    return [[at for at in row if at >= 0] for row in selected.tolist()]


def test_ab5_windows_count_what_is_cached_and_never_see_the_future() -> None:
    """(cached 4, new 3) and (0, 2): windows end at 5, 6, 7, 8, 9 and hold 5, 6, 7, 1, 2 keys."""
    batch = batch_of(((4, 3), (0, 2)), 4, torch.Generator())

    begins, ends = causal_key_ranges(batch)

    assert ends.tolist() == [5, 6, 7, 8, 9]
    assert (ends - begins).tolist() == [5, 6, 7, 1, 2]


def test_ab5_windows_of_every_small_batch() -> None:
    """Counted by hand, for every pair of (cached, new) up to 4 cached and 3 new tokens."""
    grid = [(cached, new) for cached in range(5) for new in range(1, 4)]

    for shares in [(one, other) for one in grid for other in grid]:
        begins, ends = causal_key_ranges(batch_of(shares, 2, torch.Generator()))
        expected = []
        before = 0
        for cached, new in shares:
            expected += [(before, before + cached + local + 1) for local in range(new)]
            before += cached + new
        assert list(zip(begins.tolist(), ends.tolist(), strict=True)) == expected, shares


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "fast"])
@pytest.mark.parametrize("top_k", [1, 7, 64, 1000])
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_the_best_keys_are_selected(page_size: int, top_k: int, exact: bool) -> None:
    """Ascending, -1 after the last, all -1 for padding; as many as are visible at most."""
    case = case_of(page_size=page_size)

    selected = select(case, top_k, exact=exact)

    assert selected.dtype == torch.int32
    assert selected.shape == (case.batch.num_tokens + 3, min(top_k, 512))
    assert (selected[case.batch.num_tokens :] == -1).all()
    assert as_lists(selected)[: case.batch.num_tokens] == chosen_by_hand(case, top_k)
    for row in selected.tolist():
        count = sum(at >= 0 for at in row)
        assert row[count:] == [-1] * (len(row) - count)


@pytest.mark.parametrize("top_k", [1, 5, 33])
def test_equal_scores_go_to_the_lowest_position(top_k: int) -> None:
    """Scores that are small integers, most of them several times."""
    case = case_of(whole=True)

    found = as_lists(select(case, top_k))[: case.batch.num_tokens]

    assert found == chosen_by_hand(case, top_k)


def test_ab5_later_tokens_of_the_step_do_not_exist_yet() -> None:
    """A chunk's queries select the same when all later keys of the chunk are enormous."""
    case = case_of(((300, 9),))
    before = select(case, 16)
    slots = torch.from_numpy(case.batch.kv_slots(0))

    for row in range(9):
        spoiled = case.planes["index_key"].clone()
        spoiled.flatten(0, 1)[slots[301 + row :]] = 1e6
        index = index_of(16)
        found = index.select(index.plan(case.batch), case.query, {"index_key": spoiled})
        assert torch.equal(found[: row + 1], before[: row + 1])


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
        found = index.select(index.plan(batch), query, whole.planes)
        assert torch.equal(found[:, : min(11, stop)], expected[start:stop, : min(11, stop)])


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


def test_best_ignores_what_is_not_seen() -> None:
    """NaN and infinities of recycled pages are no candidates; fewer seen than asked is all."""
    scores = torch.tensor([[1.0, torch.nan, 3.0, torch.inf], [2.0, 2.0, 2.0, 2.0]])
    seen = torch.tensor([[True, False, True, False], [True, True, True, True]])

    assert topk_mask(scores, seen, 3).tolist() == [
        [True, False, True, False],
        [True, True, True, False],
    ]
    assert topk_mask(scores, seen, 9).tolist() == seen.tolist()


def test_an_empty_batch_selects_nothing() -> None:
    """No query, no key, no column."""
    batch = batch_of((), 4, torch.Generator())
    index = index_of(4)

    found = index.select(
        index.plan(batch), IndexQuery(torch.zeros(0, HEADS, DIM), torch.zeros(0, HEADS)), {}
    )

    assert found.shape == (0, 0)


def test_sizes_below_one_are_refused() -> None:
    """The message names all three."""
    with pytest.raises(ConfigError, match="top_k=0"):
        index_of(0)
