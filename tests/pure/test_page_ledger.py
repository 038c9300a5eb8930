"""The page ledger: every page has exactly one owner, and a refused call moves none."""

from array import array
from collections.abc import Callable, Sequence
from itertools import permutations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ramify.cache import PageLedger
from ramify.errors import InvariantError, OutOfPagesError, PageOwnershipError
from tests.budget import examples

Call = Callable[[PageLedger, bytes], None]

MOVES: list[Call] = [PageLedger.give_back, PageLedger.adopt, PageLedger.require_private]


def packed(pages: Sequence[int]) -> bytes:
    return array("i", pages).tobytes()


def ids(pages: bytes) -> list[int]:
    return array("i", pages).tolist()


def counts(ledger: PageLedger) -> tuple[int, int, int]:
    return ledger.num_free, ledger.num_private, ledger.num_tree


def state(ledger: PageLedger) -> tuple:
    """Return all observable state: counts, the free list in order, and the private pages."""
    everything = range(ledger.num_pages)
    private = [page for page in everything if ledger.is_private(page)]
    return counts(ledger), ledger._free.tolist(), private


# -- moves ---------------------------------------------------------------------------------


def test_a_page_goes_from_free_to_private_to_the_tree_and_back() -> None:
    """The counts follow every move and always sum to the number of pages."""
    ledger = PageLedger(5)
    seen = [counts(ledger)]

    pages = ids(ledger.take(3))
    seen.append(counts(ledger))
    ledger.adopt(packed(pages[:2]))
    seen.append(counts(ledger))
    ledger.give_back(packed(pages[2:]))
    seen.append(counts(ledger))
    ledger.reclaim(packed(pages[:2]))
    seen.append(counts(ledger))

    assert seen == [(5, 0, 0), (2, 3, 0), (2, 1, 2), (3, 0, 2), (5, 0, 0)]
    ledger.check([])


def test_pages_are_handed_out_once_each() -> None:
    """EB4: `take` hands out each page once, over any number of rounds."""
    ledger = PageLedger(4)

    for _ in range(1000):
        pages = ledger.take(1) + ledger.take(3)
        assert sorted(ids(pages)) == [0, 1, 2, 3]
        ledger.give_back(pages)

    assert counts(ledger) == (4, 0, 0)


def test_the_pages_given_back_last_are_handed_out_first() -> None:
    """`take` returns the most recently freed pages, which may still be in a CPU cache."""
    ledger = PageLedger(4)
    pages = ids(ledger.take(4))

    ledger.give_back(packed([pages[2], pages[0], pages[1]]))

    assert ids(ledger.take(2)) == [pages[0], pages[1]]
    assert ids(ledger.take(1)) == [pages[2]]


def test_pages_go_back_from_the_tree_to_whoever_announced_them() -> None:
    """`disown` makes pages of the tree private again, in any pieces."""
    ledger = PageLedger(5)
    pages = ids(ledger.take(4))
    ledger.adopt(packed(pages))

    ledger.disown(packed(pages[1:]))
    ledger.give_back(packed([pages[2], pages[1]]))

    assert counts(ledger) == (3, 1, 1)
    assert ledger.is_private(pages[3])
    ledger.check(pages[:1])


def test_no_pages_at_all_are_fine_everywhere() -> None:
    """Every move accepts an empty list of pages and changes nothing."""
    ledger = PageLedger(2)
    ledger.take(1)
    before = state(ledger)

    assert ledger.take(0) == b""
    for call in (*MOVES, PageLedger.reclaim, PageLedger.disown):
        call(ledger, b"")

    assert state(ledger) == before


# -- private pages in any order -------------------------------------------------------------


@pytest.mark.parametrize("order", list(permutations(range(4))))
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_run_goes_in_any_order_and_in_any_pieces(order: tuple[int, ...], size: int) -> None:
    """The pages of one `take` can be adopted in any order and in any pieces."""
    ledger = PageLedger(6)
    pages = ids(ledger.take(4))
    mixed = [pages[i] for i in order]

    for start in range(0, 4, size):
        piece = mixed[start : start + size]
        ledger.adopt(packed(piece))
        assert not any(ledger.is_free(page) or ledger.is_private(page) for page in piece)
        assert all(ledger.is_private(page) for page in mixed[start + size :])
        ledger.check(mixed[: start + size])

    assert counts(ledger) == (2, 0, 4)


def test_pages_of_several_runs_go_together() -> None:
    """One `give_back` accepts pages of several `take` calls."""
    ledger = PageLedger(10)
    first, second, third = (ids(ledger.take(count)) for count in (3, 2, 4))

    ledger.give_back(packed([*first[1:], *second, *third[:3]]))

    assert counts(ledger) == (8, 2, 0)
    assert ledger.is_private(first[0])
    assert ledger.is_private(third[3])
    ledger.check([])


def test_the_middle_of_a_run_leaves_both_ends_private() -> None:
    """Adopting the middle of a run leaves both ends private and usable."""
    ledger = PageLedger(6)
    pages = ids(ledger.take(6))

    ledger.adopt(packed(pages[2:4]))
    ledger.give_back(packed([*pages[4:], *pages[:2]]))

    assert counts(ledger) == (4, 0, 2)
    ledger.check(pages[2:4])


def test_a_run_used_from_its_head_stays_one_run() -> None:
    """Adopting a run page by page from its head does not fragment it."""
    ledger = PageLedger(1000)
    pages = ids(ledger.take(1000))

    for page in pages[:500]:
        ledger.adopt(packed([page]))
        assert len(ledger._runs) == 1
    ledger.give_back(packed(pages[500:]))

    assert ledger._runs == {}
    assert counts(ledger) == (500, 0, 500)


@pytest.mark.parametrize("call", MOVES)
def test_requiring_or_refusing_pages_forgets_nobody(call: Call) -> None:
    """A refused call changes no owner, even if it has split runs."""
    ledger = PageLedger(8)
    pages = ids(ledger.take(6))
    ledger.require_private(packed([pages[4], pages[1]]))
    with pytest.raises(PageOwnershipError):
        call(ledger, packed([pages[3], pages[2], pages[0], pages[3]]))

    ledger.give_back(packed(pages))

    assert counts(ledger) == (8, 0, 0)
    ledger.check([])


# -- what is refused -----------------------------------------------------------------------


def test_too_many_pages_are_refused_with_the_numbers() -> None:
    """`take` beyond the free pages takes none; the error has the requested and free counts."""
    ledger = PageLedger(3)
    ledger.take(1)

    with pytest.raises(OutOfPagesError) as caught:
        ledger.take(3)

    assert (caught.value.asked, caught.value.free, caught.value.total) == (3, 2, 3)
    assert counts(ledger) == (2, 1, 0)


@pytest.mark.parametrize("num_pages", [0, -1, 2**31])
def test_a_ledger_has_pages_that_fit_an_int32(num_pages: int) -> None:
    """A ledger with an invalid number of pages is refused by its constructor."""
    with pytest.raises(ValueError, match=f"num_pages={num_pages}"):
        PageLedger(num_pages)


def test_a_negative_count_is_refused() -> None:
    """`take` refuses a negative count."""
    with pytest.raises(ValueError, match="-1 pages"):
        PageLedger(3).take(-1)


@pytest.mark.parametrize("call", MOVES)
@pytest.mark.parametrize("wrong", ["free", "in the tree", "twice", "outside", "negative"])
@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_one_wrong_page_moves_none(call: Call, wrong: str, place: int) -> None:
    """An invalid page at any position is named in the error, and no page moves."""
    ledger = PageLedger(7)
    private, tree = ids(ledger.take(3)), ids(ledger.take(2))
    ledger.adopt(packed(tree))
    bad, named = {
        "free": (ledger._free[-1], "free, not private"),
        "in the tree": (tree[1], "in the tree, not private"),
        "twice": (private[0], "twice"),
        "outside": (7, "page 7 is outside 0..6"),
        "negative": (-1, "page -1 is outside 0..6"),
    }[wrong]
    before = state(ledger)

    with pytest.raises(PageOwnershipError, match=named):
        call(ledger, packed([*private[:place], bad, *private[place:]]))

    assert state(ledger) == before
    ledger.check(tree)


@pytest.mark.parametrize("call", MOVES)
@pytest.mark.parametrize(
    "picked", [[0, 0], [0, 1, 0], [1, 1], [0, 1, 1], [2, 0, 1, 2], [3, 2, 1, 0, 1], [0, 1, 2, 3, 2]]
)
def test_a_page_named_twice_is_refused(call: Call, picked: list[int]) -> None:
    """A call that names a page twice moves no page, however runs are split."""
    ledger = PageLedger(5)
    pages = ids(ledger.take(4))
    before = state(ledger)

    with pytest.raises(PageOwnershipError, match="twice"):
        call(ledger, packed([pages[i] for i in picked]))

    assert state(ledger) == before
    ledger.check([])


# -- the recount ---------------------------------------------------------------------------


def corrupt_free_list(ledger: PageLedger) -> None:
    ledger._free[0] = ledger._free[1]


def corrupt_run(ledger: PageLedger) -> None:
    head = next(iter(ledger._runs))
    ledger._runs[head] = head + packed([ledger._free[0]])


def lose_run(ledger: PageLedger) -> None:
    ledger._num_private -= len(ledger._runs.popitem()[1]) // 4


def misplace_run(ledger: PageLedger) -> None:
    ledger._runs[packed([ledger._free[0]])] = ledger._runs.popitem()[1]


def corrupt_count(ledger: PageLedger) -> None:
    ledger._num_private += 1


@pytest.mark.parametrize(
    "corrupt", [corrupt_free_list, corrupt_run, lose_run, misplace_run, corrupt_count]
)
def test_check_finds_a_contradiction(corrupt: Callable[[PageLedger], None]) -> None:
    """`check` raises for a page with two owners, without an owner, or miscounted."""
    ledger = PageLedger(8)
    tree = ledger.take(2)
    ledger.adopt(tree)
    ledger.take(2)
    ledger.check(ids(tree))

    corrupt(ledger)

    with pytest.raises(InvariantError):
        ledger.check(ids(tree))


@pytest.mark.parametrize("claim", ["one less", "one more", "twice"])
def test_check_compares_with_what_the_tree_holds(claim: str) -> None:
    """`check` raises if the tree's pages are missing, foreign or duplicated."""
    ledger = PageLedger(6)
    tree, private = ids(ledger.take(2)), ids(ledger.take(1))
    ledger.adopt(packed(tree))
    claims = {"one less": tree[:1], "one more": tree + private, "twice": tree + tree[:1]}

    with pytest.raises(InvariantError):
        ledger.check(claims[claim])


@pytest.mark.parametrize("wrong", ["free", "private", "twice"])
def test_check_finds_what_reclaim_takes_on_trust(wrong: str) -> None:
    """`reclaim` does not verify its pages; `check` finds a page that was reclaimed wrongly."""
    ledger = PageLedger(6)
    tree, private = ids(ledger.take(2)), ids(ledger.take(1))
    ledger.adopt(packed(tree))
    bad = {"free": ledger._free[0], "private": private[0], "twice": tree[0]}[wrong]

    ledger.reclaim(packed([tree[0], bad]))

    with pytest.raises(InvariantError, match="two owners"):
        ledger.check(tree[1:])


# -- against a model -----------------------------------------------------------------------


class LedgerMachine(RuleBasedStateMachine):
    """Pages that come and go in any order; a dict knows the owner of each, a list what is free."""

    @initialize(num_pages=st.integers(1, 24))
    def make(self, num_pages: int) -> None:
        self.ledger = PageLedger(num_pages)
        self.owner = dict.fromkeys(range(num_pages), "free")
        self.free = list(range(num_pages))
        self.private: list[int] = []  # in the order in which they were taken

    def pick(self, data: st.DataObject, pages: list[int]) -> list[int]:
        """Draw a slice of pages, sometimes strided, reversed or permuted."""
        start, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(pages))] * 2)))
        step = data.draw(st.sampled_from([1, 1, 1, 2, -1, 0]))
        some = pages[start:stop]
        return some[::step] if step else list(data.draw(st.permutations(some)))

    @rule(count=st.integers(0, 9))
    def take(self, count: int) -> None:
        if count > len(self.free):
            with pytest.raises(OutOfPagesError):
                self.ledger.take(count)
            return
        keep = len(self.free) - count
        expected = self.free[keep:]
        del self.free[keep:]

        assert ids(self.ledger.take(count)) == expected

        self.private += expected
        self.owner.update(dict.fromkeys(expected, "private"))

    @precondition(lambda self: self.private)
    @rule(data=st.data(), to=st.sampled_from(["free", "tree", "private"]))
    def use_private(self, data: st.DataObject, to: str) -> None:
        pages = self.pick(data, self.private)
        if to == "private":
            self.ledger.require_private(packed(pages))
            return
        call = self.ledger.give_back if to == "free" else self.ledger.adopt
        call(packed(pages))
        self.private = [page for page in self.private if page not in pages]
        self.owner.update(dict.fromkeys(pages, to))
        self.free += pages if to == "free" else []

    @rule(data=st.data(), to=st.sampled_from(["free", "private"]))
    def use_tree(self, data: st.DataObject, to: str) -> None:
        pages = self.pick(data, [page for page, owner in self.owner.items() if owner == "tree"])
        if to == "free":
            self.ledger.reclaim(packed(pages))
        else:
            self.ledger.disown(packed(pages))
            self.private += pages
        self.owner.update(dict.fromkeys(pages, to))
        self.free += pages if to == "free" else []

    @rule(data=st.data(), call=st.sampled_from(MOVES))
    def misuse(self, data: st.DataObject, call: Call) -> None:
        """Call with one extra page that is not private, or is named twice; asserts the refusal."""
        pages = self.pick(data, self.private)
        wrong = [page for page, owner in self.owner.items() if owner != "private"]
        wrong += [*pages, -1, self.ledger.num_pages]
        pages.insert(data.draw(st.integers(0, len(pages))), data.draw(st.sampled_from(wrong)))
        with pytest.raises(PageOwnershipError):
            call(self.ledger, packed(pages))

    @invariant()
    def the_model_agrees(self) -> None:
        for page, owner in self.owner.items():
            assert self.ledger.is_free(page) == (owner == "free")
            assert self.ledger.is_private(page) == (owner == "private")
        owned = [list(self.owner.values()).count(owner) for owner in ("free", "private", "tree")]
        assert list(counts(self.ledger)) == owned
        assert self.ledger._free.tolist() == self.free
        self.ledger.check([page for page, owner in self.owner.items() if owner == "tree"])


LedgerMachine.TestCase.settings = settings(max_examples=examples(300), stateful_step_count=30)
TestLedgerMachine = LedgerMachine.TestCase
