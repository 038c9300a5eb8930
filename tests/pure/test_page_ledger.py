"""The page ledger: every page has exactly one owner, and a refused call moves none."""

from collections.abc import Callable

import pytest

from ramify.cache import PageLedger
from ramify.errors import InvariantError, OutOfPagesError, PageOwnershipError


def counts(ledger: PageLedger) -> tuple[int, int, int]:
    return ledger.num_free, ledger.num_private, ledger.num_tree


def test_a_page_goes_from_free_to_private_to_the_tree_and_back() -> None:
    """The counts follow every move, and always add up to all pages."""
    ledger = PageLedger(5)
    seen = [counts(ledger)]

    pages = ledger.take(3)
    seen.append(counts(ledger))
    ledger.adopt(pages[:2])
    seen.append(counts(ledger))
    ledger.give_back(pages[2:])
    seen.append(counts(ledger))
    ledger.reclaim(pages[:2])
    seen.append(counts(ledger))

    assert seen == [(5, 0, 0), (2, 3, 0), (2, 1, 2), (3, 0, 2), (5, 0, 0)]
    ledger.check([])


def test_pages_are_handed_out_once_each() -> None:
    """EB4: all pages can be taken, none twice, over any number of rounds."""
    ledger = PageLedger(4)

    for _ in range(1000):
        pages = ledger.take(1) + ledger.take(3)
        assert sorted(pages) == [0, 1, 2, 3]
        ledger.give_back(pages)

    assert ledger.num_free == 4


def test_the_page_given_back_last_is_handed_out_first() -> None:
    """A page's bytes are reused while they may still be in a hardware cache."""
    ledger = PageLedger(4)
    pages = ledger.take(4)

    ledger.give_back([pages[2], pages[0]])

    assert ledger.take(2) == [pages[0], pages[2]]


def test_too_many_pages_are_refused_with_the_numbers() -> None:
    """All or nothing: the error says what was asked for and what there is."""
    ledger = PageLedger(3)
    ledger.take(1)

    with pytest.raises(OutOfPagesError) as caught:
        ledger.take(3)

    assert (caught.value.asked, caught.value.free, caught.value.total) == (3, 2, 3)
    assert counts(ledger) == (2, 1, 0)


@pytest.mark.parametrize("num_pages", [0, -1])
def test_a_ledger_needs_a_page(num_pages: int) -> None:
    """An empty pool is an error when it is made, not when it is used."""
    with pytest.raises(ValueError, match=f"num_pages={num_pages}"):
        PageLedger(num_pages)


def test_a_negative_count_is_refused() -> None:
    """Nobody can take fewer than no pages."""
    with pytest.raises(ValueError, match="-1 pages"):
        PageLedger(3).take(-1)


@pytest.mark.parametrize("call", [PageLedger.give_back, PageLedger.adopt, PageLedger.reclaim])
@pytest.mark.parametrize("wrong", ["free", "other owner", "twice", "too large", "negative"])
def test_one_wrong_page_moves_none(call: Callable, wrong: str) -> None:
    """Each call checks all its pages before it moves the first."""
    ledger = PageLedger(6)
    private, tree = ledger.take(2), ledger.take(2)
    ledger.adopt(tree)
    good, bad = (tree, private) if call is PageLedger.reclaim else (private, tree)
    free = ledger.take(1)
    ledger.give_back(free)
    last = {
        "free": free[0],
        "other owner": bad[0],
        "twice": good[0],
        "too large": 6,
        "negative": -1,
    }

    with pytest.raises(PageOwnershipError):
        call(ledger, [*good, last[wrong]])

    assert counts(ledger) == (2, 2, 2)
    assert all(ledger.is_private(page) for page in private)
    assert ledger.is_free(free[0])
    ledger.check(tree)


def corrupt_free_list(ledger: PageLedger) -> None:
    ledger._free[0] = ledger._free[1]


def corrupt_owner(ledger: PageLedger) -> None:
    ledger._owner[ledger._free[0]] = 1


def corrupt_count(ledger: PageLedger) -> None:
    ledger._num_private += 1


@pytest.mark.parametrize("corrupt", [corrupt_free_list, corrupt_owner, corrupt_count])
def test_check_finds_a_contradiction(corrupt: Callable[[PageLedger], None]) -> None:
    """A page owned twice, not at all, or miscounted does not pass."""
    ledger = PageLedger(6)
    tree = ledger.take(2)
    ledger.adopt(tree)
    ledger.check(tree)

    corrupt(ledger)

    with pytest.raises(InvariantError):
        ledger.check(tree)


@pytest.mark.parametrize("claim", ["one less", "one more", "twice"])
def test_check_compares_with_what_the_tree_holds(claim: str) -> None:
    """A tree that lost a page, has one that is not its own, or has one twice does not pass."""
    ledger = PageLedger(6)
    tree, private = ledger.take(2), ledger.take(1)
    ledger.adopt(tree)
    claims = {"one less": tree[:1], "one more": tree + private, "twice": tree + tree[:1]}

    with pytest.raises(InvariantError):
        ledger.check(claims[claim])
