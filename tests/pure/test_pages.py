"""Page ids as they travel: packed bytes that behave like a sequence of integers."""

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
    """Length, order, search and truth are those of the list."""
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
def test_pages_equal_any_sequence_with_the_same_ids(one: list[int], other: list[int]) -> None:
    """Lists, tuples, arrays of any width and other pages compare by content, from both sides."""
    pages = Pages.of(one)

    for form in (list, tuple, Pages.of, lambda ids: array("i", ids), lambda ids: array("q", ids)):
        assert (pages == form(other)) == (one == other)
        assert (form(other) == pages) == (one == other)
        assert (pages != form(other)) == (one != other)
        assert pages == form(one)


@pytest.mark.parametrize("other", [None, 1, "1", b"\1\0\0\0", {1}, [1.5], ["1"], [[1]]])
def test_pages_equal_nothing_else(other: Any) -> None:
    """Text, bytes, sets and sequences of other things are not these pages."""
    assert Pages.of([1]) != other
    assert other != Pages.of([1])


@given(IDS)
def test_pages_hash_like_the_tuple_of_their_ids(ids: list[int]) -> None:
    """Equal values must have equal hashes; lists and arrays, equal too, have none."""
    assert hash(Pages.of(ids)) == hash(tuple(ids))
    assert {Pages.of(ids): 1}[tuple(ids)] == 1  # type: ignore[index]


@given(IDS, AT, AT, st.none() | st.integers(-4, 4).filter(bool))
def test_a_slice_of_pages_is_pages(
    ids: list[int], start: int | None, stop: int | None, step: int | None
) -> None:
    """Any slice, as of a list; the result is packed again."""
    cut = Pages.of(ids)[start:stop:step]

    assert type(cut) is Pages
    assert cut == ids[start:stop:step]
    assert len(cut.packed) == 4 * len(ids[start:stop:step])


@given(IDS.filter(bool), st.data())
def test_an_index_counts_from_either_end(ids: list[int], data: st.DataObject) -> None:
    """An integer, also one of numpy's; what lies outside is an IndexError."""
    at = data.draw(st.integers(-len(ids), len(ids) - 1))
    pages = Pages.of(ids)

    number: Any = np.int64(at)

    assert pages[at] == pages[number] == ids[at]
    for outside in (len(ids), -len(ids) - 1):
        with pytest.raises(IndexError):
            pages[outside]


@given(IDS, IDS)
def test_pages_are_joined_with_what_they_stand_beside(one: list[int], other: list[int]) -> None:
    """Pages plus any ids are pages; a list or a tuple plus pages stays what it is."""
    pages = Pages.of(one)

    assert type(pages + other) is type(pages + Pages.of(other)) is Pages
    assert pages + other == pages + tuple(other) == pages + Pages.of(other) == one + other
    assert other + pages == other + one
    assert (*other, *one) == tuple(other) + pages
    assert type(other + pages) is list
    assert type(tuple(other) + pages) is tuple
    grown = list(other)
    grown += pages
    assert grown == other + one


def test_pages_say_what_they_are() -> None:
    """A failed comparison shows the ids."""
    assert repr(Pages.of([7, 2])) == "Pages([7, 2])"


@given(IDS)
def test_pages_are_copied_and_pickled_by_value(ids: list[int]) -> None:
    """A lease's pages can go to another thread or process."""
    pages = Pages.of(ids)

    assert pickle.loads(pickle.dumps(pages)) == copy.copy(pages) == copy.deepcopy(pages) == pages


def test_of_takes_pages_as_they_are() -> None:
    """Nothing is packed twice."""
    pages = Pages.of([1, 2])

    assert Pages.of(pages) is pages


# -- numpy ---------------------------------------------------------------------------------


@given(IDS)
def test_numpy_sees_the_ids(ids: list[int]) -> None:
    """As int32, also when there are none; a wider dtype is converted."""
    pages = Pages.of(ids)

    assert np.asarray(pages).dtype == np.int32
    assert np.asarray(pages).tolist() == ids
    assert np.asarray(pages, dtype=np.int64).tolist() == ids
    assert np.array(pages).tolist() == ids


def test_numpy_copies_nothing() -> None:
    """The array looks at the packed bytes themselves, and therefore cannot be written."""
    pages = Pages.of([3, 1, 2])

    seen = np.asarray(pages)

    assert np.shares_memory(seen, np.frombuffer(pages.packed, np.int32))
    assert not seen.flags.writeable
    assert np.asarray(pages[1:]).tolist() == [1, 2]


def test_a_row_of_a_table_takes_pages() -> None:
    """A block table assigns a lease's pages to a slice of a row."""
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
    """Whatever a caller keeps its pages in, they arrive as int32."""
    assert pack_pages(form) == array("i", [3, 4, 5]).tobytes()
    assert Pages.of(form) == [3, 4, 5]


@pytest.mark.parametrize("empty", [[], (), range(0), Pages(), np.zeros(0, np.int32)])
def test_no_pages_pack_to_nothing(empty: Any) -> None:
    """The default of every call."""
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
    """A float, a text or a number beyond int32 is told as such, not cut to fit."""
    with pytest.raises(PageOwnershipError, match="int32"):
        pack_pages(wrong)


def test_packing_is_a_copy() -> None:
    """EB11: a list or buffer that its owner changes later changes nothing."""
    kept = array("i", [1, 2])
    pages = Pages.of(kept)

    kept[0] = 9

    assert pages == [1, 2]
