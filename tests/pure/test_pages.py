"""`Pages`: page ids as packed int32 bytes that behave like a sequence of integers."""

import copy
import pickle
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ramify.cache import Pages
from ramify.cache.pages import pack_pages
from ramify.errors import PageOwnershipError

IDS = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=12)
AT = st.none() | st.integers(-15, 15)


@given(IDS)
def test_pages_are_a_sequence_of_their_ids(ids: list[int]) -> None:
    """Length, order, search and truth value equal those of the list of ids."""
    pages = Pages.of(ids)

    assert isinstance(pages, Sequence)
    assert len(pages) == len(ids)
    assert bool(pages) == bool(ids)
    assert list(pages) == ids
    assert list(reversed(pages)) == ids[::-1]
    assert [pages.index(page) for page in ids] == [ids.index(page) for page in ids]
    assert all(page in pages for page in ids)
    assert [page in pages for page in (7, -1)] == [page in ids for page in (7, -1)]
    assert all(type(page) is int for page in pages)
    assert pages.packed == array("i", ids).tobytes()


@given(IDS, IDS)
def test_pages_equal_any_sequence_with_the_same_ids(left: list[int], right: list[int]) -> None:
    """Pages equal lists, tuples, arrays and Pages with the same ids, in either operand order."""
    pages = Pages.of(left)

    for form in (list, tuple, Pages.of, lambda ids: array("i", ids), lambda ids: array("q", ids)):
        assert (pages == form(right)) == (left == right)
        assert (form(right) == pages) == (left == right)
        assert (pages != form(right)) == (left != right)
        assert pages == form(left)


@pytest.mark.parametrize("right", [None, 1, "1", b"\1\0\0\0", {1}, [1.5], ["1"], [[1]]])
def test_pages_equal_nothing_else(right: Any) -> None:
    """Pages never equal text, bytes, sets or sequences of anything but ids."""
    assert Pages.of([1]) != right
    assert right != Pages.of([1])


@given(IDS)
def test_pages_hash_like_the_tuple_of_their_ids(ids: list[int]) -> None:
    """Pages hash like the tuple of their ids."""
    assert hash(Pages.of(ids)) == hash(tuple(ids))
    assert {Pages.of(ids): 1}[tuple(ids)] == 1  # type: ignore[index]


@given(IDS, AT, AT, st.none() | st.integers(-4, 4).filter(bool))
def test_a_slice_of_pages_is_pages(
    ids: list[int], start: int | None, stop: int | None, step: int | None
) -> None:
    """Any slice is a packed Pages with the ids of the list's slice."""
    cut = Pages.of(ids)[start:stop:step]

    assert type(cut) is Pages
    assert cut == ids[start:stop:step]
    assert len(cut.packed) == 4 * len(ids[start:stop:step])


@given(IDS.filter(bool), st.data())
def test_an_index_counts_from_either_end(ids: list[int], data: st.DataObject) -> None:
    """Positive, negative and numpy indices work; an index out of range raises IndexError."""
    at = data.draw(st.integers(-len(ids), len(ids) - 1))
    pages = Pages.of(ids)

    number: Any = np.int64(at)

    assert pages[at] == pages[number] == ids[at]
    for outside in (len(ids), -len(ids) - 1):
        with pytest.raises(IndexError):
            pages[outside]


@given(IDS, IDS)
def test_pages_are_joined_with_what_they_stand_beside(left: list[int], right: list[int]) -> None:
    """`Pages + ids` is Pages; `list + Pages` is a list and `tuple + Pages` a tuple."""
    pages = Pages.of(left)

    assert type(pages + right) is type(pages + Pages.of(right)) is Pages
    assert pages + right == pages + tuple(right) == pages + Pages.of(right) == left + right
    assert right + pages == right + left
    assert (*right, *left) == tuple(right) + pages
    assert type(right + pages) is list
    assert type(tuple(right) + pages) is tuple
    grown = list(right)
    grown += pages
    assert grown == right + left


def test_pages_say_what_they_are() -> None:
    """`repr` shows the ids."""
    assert repr(Pages.of([7, 2])) == "Pages([7, 2])"


@given(IDS)
def test_pages_are_copied_and_pickled_by_value(ids: list[int]) -> None:
    """Copies and pickles of Pages equal the original."""
    pages = Pages.of(ids)

    assert pickle.loads(pickle.dumps(pages)) == copy.copy(pages) == copy.deepcopy(pages) == pages


def test_of_takes_pages_as_they_are() -> None:
    """`Pages.of(pages)` returns the same object."""
    pages = Pages.of([1, 2])

    assert Pages.of(pages) is pages


# -- numpy ---------------------------------------------------------------------------------


@given(IDS)
def test_numpy_sees_the_ids(ids: list[int]) -> None:
    """`np.asarray` gives int32 ids, or the dtype that was requested, also for empty Pages."""
    pages = Pages.of(ids)

    assert np.asarray(pages).dtype == np.int32
    assert np.asarray(pages).tolist() == ids
    assert np.asarray(pages, dtype=np.int64).tolist() == ids
    assert np.array(pages).tolist() == ids


def test_numpy_copies_nothing() -> None:
    """`np.asarray` is a read-only view of the packed bytes."""
    pages = Pages.of([3, 1, 2])

    seen = np.asarray(pages)

    assert np.shares_memory(seen, np.frombuffer(pages.packed, np.int32))
    assert not seen.flags.writeable
    assert np.asarray(pages[1:]).tolist() == [1, 2]


def test_a_row_of_a_table_takes_pages() -> None:
    """Pages can be assigned to a slice of a block-table row."""
    table = np.zeros((2, 4), np.int32)

    table[1, 1:3] = Pages.of([7, 2])

    assert table.tolist() == [[0, 0, 0, 0], [0, 7, 2, 0]]


# -- packing -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "form",
    [
        [3, 4, 5],
        (3, 4, 5),
        range(3, 6),
        array("i", [3, 4, 5]),
        array("q", [3, 4, 5]),
        array("B", [3, 4, 5]),
        Pages.of([3, 4, 5]),
        np.array([3, 4, 5], np.int32),
        np.array([3, 4, 5], np.int64),
        np.array([[0, 3, 4, 5], [6, 7, 8, 9]], np.int32)[0, 1:],
        np.array([[3, 0], [4, 0], [5, 0]], np.int64)[:, 0],
        [np.int32(3), np.int64(4), 5],
    ],
    ids=[
        "list",
        "tuple",
        "range",
        "int32 array",
        "int64 array",
        "uint8 array",
        "pages",
        "numpy int32",
        "numpy int64",
        "numpy row",
        "numpy column",
        "numpy numbers",
    ],
)
def test_every_form_of_page_ids_packs_to_the_same_bytes(form: Any) -> None:
    """Every sequence type packs to the same int32 bytes."""
    assert pack_pages(form) == array("i", [3, 4, 5]).tobytes()
    assert Pages.of(form) == [3, 4, 5]


@pytest.mark.parametrize("empty", [[], (), range(0), Pages(), np.zeros(0, np.int32)])
def test_no_pages_pack_to_nothing(empty: Any) -> None:
    """Every empty form packs to no bytes."""
    assert pack_pages(empty) == b""
    assert Pages.of(empty) == []


@pytest.mark.parametrize(
    "wrong",
    [
        [2**31],
        [-(2**31) - 1],
        [1.0],
        ["1"],
        [None],
        "12",
        b"\x01\x02",
        None,
        5,
        np.array([1.5]),
        np.array([2**31], np.int64),
    ],
)
def test_what_is_no_page_id_is_refused(wrong: Any) -> None:
    """A float, a text or a number beyond int32 raises PageOwnershipError."""
    with pytest.raises(PageOwnershipError, match="int32"):
        pack_pages(wrong)


def test_packing_is_a_copy() -> None:
    """EB11: changing the source list or buffer later does not change the Pages."""
    kept = array("i", [1, 2])
    pages = Pages.of(kept)

    kept[0] = 9

    assert pages == [1, 2]
