"""Cache keys: packed token ids inside a namespace."""

import hashlib
import struct
from array import array
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ramify.cache import CacheKey, namespace_of, namespace_parts
from ramify.cache.packed import common_pages
from ramify.errors import InvalidKeyError

# Of range(10) in the namespace "model", in pages of 4: what stores and routers know pages by.
HASHES = ["135c373af3165c64d503e180d18b121c", "e03a7fa3da8db42fbfeab3215035c0d8"]
TOKENS = st.lists(st.integers(0, 2), max_size=40)
PARTS = st.dictionaries(
    st.text(max_size=3),
    st.one_of(st.text(max_size=3), st.binary(max_size=3), st.integers()),
    max_size=3,
)


@pytest.mark.parametrize(
    "form",
    [
        [1, 2, 2**31 - 1],
        (1, 2, 2**31 - 1),
        array("i", [1, 2, 2**31 - 1]),
        array("q", [1, 2, 2**31 - 1]),
        array("i", [1, 2, 2**31 - 1]).tobytes(),
        bytearray(array("i", [1, 2, 2**31 - 1]).tobytes()),
        iter([1, 2, 2**31 - 1]),
    ],
    ids=["list", "tuple", "int32 array", "int64 array", "bytes", "bytearray", "iterator"],
)
def test_every_form_of_token_ids_gives_the_same_key(form: Any) -> None:
    """Lists, tuples, arrays, iterators and packed bytes of the same ids give equal keys."""
    key = CacheKey(form, "a")

    assert key == CacheKey([1, 2, 2**31 - 1], b"a")
    assert hash(key) == hash(CacheKey([1, 2, 2**31 - 1], b"a"))
    assert key.tokens().tolist() == [1, 2, 2**31 - 1]


@pytest.mark.parametrize(
    ("tokens", "named"),
    [
        ([1, -1], "-1"),
        (array("i", [3, -7]), "-7"),
        ([2**31], "0..2147483647"),
        ([2**70], "0..2147483647"),
        ([1.0], "integers"),
        (["1"], "integers"),
        ("12", "integers"),
        ([None], "integers"),
        (None, "integers"),
        (b"\0\0\0\0\0", "5 bytes"),
    ],
)
def test_what_is_no_token_id_is_refused_by_name(tokens: Any, named: str) -> None:
    """PB25: ids that are negative, beyond int32 or not integers raise ValueError naming them."""
    with pytest.raises(ValueError, match=named):
        CacheKey(tokens)


def test_a_key_keeps_its_own_copy_of_the_tokens() -> None:
    """EB11: changing the caller's list or bytearray does not change the key."""
    tokens, packed = [1, 2], bytearray(8)
    first, second = CacheKey(tokens), CacheKey(packed)

    tokens[0] = 9
    packed[0] = 9

    assert first.tokens().tolist() == [1, 2]
    assert second.tokens().tolist() == [0, 0]


def test_keys_of_two_namespaces_differ() -> None:
    """Equal tokens in two namespaces are different keys; a name equals its UTF-8 bytes."""
    assert CacheKey([1], "a") != CacheKey([1], "b")
    assert CacheKey([1], "é") == CacheKey([1], "é".encode())


def test_pages_of_no_tokens_are_refused() -> None:
    with pytest.raises(InvalidKeyError, match="page_size=0"):
        CacheKey([1, 2]).num_pages(0)
    with pytest.raises(InvalidKeyError, match="page_size=-4"):
        CacheKey([1, 2]).page_hashes(-4)


def test_a_key_counts_tokens_and_whole_pages() -> None:
    """The length is in tokens; only full pages are counted."""
    key = CacheKey(range(7))

    assert len(key) == 7
    assert [key.num_pages(size) for size in (1, 3, 7, 8)] == [7, 2, 1, 0]
    assert len(CacheKey([])) == 0


@given(TOKENS, st.integers(0, 50))
def test_a_prefix_is_the_first_tokens_in_the_same_namespace(tokens: list[int], cut: int) -> None:
    """A key's prefix is the key of its first tokens in the same namespace."""
    assert CacheKey(tokens, "n").prefix(cut) == CacheKey(tokens[:cut], "n")


@given(PARTS, PARTS)
def test_different_parts_give_different_namespaces(
    left: dict[str, str | bytes | int], right: dict[str, str | bytes | int]
) -> None:
    """Different salts, tenants or adapters never give the same namespace."""
    same = {name: (type(value), value) for name, value in left.items()} == {
        name: (type(value), value) for name, value in right.items()
    }

    assert (namespace_of(**left) == namespace_of(**right)) == same


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ({"a": "1"}, {"a": 1}),
        ({"a": "1"}, {"a": b"1"}),
        ({"a": "b", "c": ""}, {"a": "", "c": "b"}),
        ({"ab": "c"}, {"a": "bc"}),
        ({"a": ""}, {}),
    ],
)
def test_parts_that_look_alike_give_different_namespaces(left: dict, right: dict) -> None:
    """Types, borders between parts and empty parts change the namespace."""
    assert namespace_of(**left) != namespace_of(**right)


def test_the_order_of_the_parts_does_not_matter() -> None:
    """The order of the named parts does not change the namespace."""
    assert namespace_of(model="m", epoch=3) == namespace_of(epoch=3, model="m")


def test_a_namespace_of_parts_never_changes() -> None:
    """A namespace's bytes are a stable format: every chain of page hashes starts from them."""
    assert namespace_of(model="é", epoch=-3, salt=b"\0") == (
        b"\0\0\0\x05epoch" + b"\0\0\0\x02-3" + b"i"
        b"\0\0\0\x05model" + b"\0\0\0\x02\xc3\xa9" + b"s"
        b"\0\0\0\x04salt" + b"\0\0\0\x01\0" + b"b"
    )


@pytest.mark.parametrize("value", [None, 1.5, True, ("a",)])
def test_a_part_of_another_type_is_refused(value: Any) -> None:
    """Parts other than text, bytes or integers are refused by name."""
    with pytest.raises(ValueError, match="tenant="):
        namespace_of(tenant=value)


@given(TOKENS, TOKENS, st.integers(1, 5), st.integers(0, 3))
def test_common_pages_counts_equal_pages_from_the_start(
    left: list[int], right: list[int], page_size: int, skip: int
) -> None:
    """The binary search counts the same pages as a page-by-page comparison."""
    page_bytes, start = page_size * 4, skip * 4
    first, second = bytes(start) + CacheKey(left).atoms, bytes(start) + CacheKey(right).atoms
    expected = 0
    for at in range(start, min(len(first), len(second)) - page_bytes + 1, page_bytes):
        if first[at : at + page_bytes] != second[at : at + page_bytes]:
            break
        expected += 1

    assert common_pages(first, second, page_bytes, start) == expected


# -- page hashes ---------------------------------------------------------------------------


def chained(tokens: list[int], namespace: bytes, page_size: int) -> list[bytes]:
    """An independent implementation of `page_hashes`."""
    hashed = hashlib.blake2b(namespace, digest_size=16, person=b"ramify-ns").digest()
    hashes = []
    for start in range(0, len(tokens) - page_size + 1, page_size):
        page = struct.pack(f"<{page_size}i", *tokens[start : start + page_size])
        hashed = hashlib.blake2b(hashed + page, digest_size=16).digest()
        hashes.append(hashed)
    return hashes


def test_page_hashes_never_change() -> None:
    """Page hashes are a stable format that other processes and machines rely on."""
    hashes = CacheKey(range(10), "model").page_hashes(4)

    assert [page_hash.hex() for page_hash in hashes] == HASHES


@given(
    st.lists(st.integers(0, 2**31 - 1), max_size=20),
    st.binary(max_size=4),
    st.integers(1, 6),
)
def test_page_hashes_follow_the_rule(tokens: list[int], namespace: bytes, page_size: int) -> None:
    """BLAKE2b-128 of the previous hash and the page's ids, little-endian; whole pages only."""
    hashes = CacheKey(tokens, namespace).page_hashes(page_size)

    assert hashes == chained(tokens, namespace, page_size)
    assert len(hashes) == len(tokens) // page_size


def test_page_hashes_name_a_page_and_all_before_it() -> None:
    """A different first token, namespace or page size changes every page hash."""
    hashes = CacheKey(range(10), "model").page_hashes(4)
    others = [
        CacheKey([9, *range(1, 8)], "model").page_hashes(4),
        CacheKey(range(8), "other").page_hashes(4),
        CacheKey(range(8)).page_hashes(4),
        CacheKey(range(8), "model").page_hashes(2),
    ]

    assert CacheKey(range(8), "model").page_hashes(4) == hashes
    assert all(set(hashes).isdisjoint(right) for right in others)


@given(TOKENS, TOKENS, st.integers(1, 5))
def test_page_hashes_agree_as_far_as_the_pages_do(
    left: list[int], right: list[int], page_size: int
) -> None:
    """Hashes of two keys are equal in the common prefix and differ after it."""
    first, second = CacheKey(left), CacheKey(right)
    shared = common_pages(first.atoms, second.atoms, page_size * 4)
    pairs = list(zip(first.page_hashes(page_size), second.page_hashes(page_size), strict=False))

    assert [mine == theirs for mine, theirs in pairs] == [i < shared for i in range(len(pairs))]


def test_equal_pages_have_different_hashes_in_different_places() -> None:
    """AB22: equal pages at different positions have different hashes."""
    hashes = CacheKey([0] * 40).page_hashes(4)

    assert len(set(hashes)) == 10
    assert all(len(page_hash) == 16 for page_hash in hashes)
    assert all(page_hash != after for page_hash, after in pairwise(hashes))


@pytest.mark.parametrize("namespace", [0, 3, None, 10**9, ["a"]])
def test_a_namespace_is_text_or_bytes(namespace: Any) -> None:
    """Namespaces of other types are refused: bytes(10**9) would be a gigabyte."""
    with pytest.raises(InvalidKeyError, match="namespace="):
        CacheKey([1], namespace)


@pytest.mark.parametrize("wrong", [memoryview(b"\0\0\0\1"), {1, 2}, frozenset([1]), {1: 2}])
def test_what_has_no_order_or_no_ids_is_no_key(wrong: Any) -> None:
    """Sets, mappings and views of packed bytes are refused as token ids."""
    with pytest.raises(InvalidKeyError, match="not a sequence of token ids"):
        CacheKey(wrong)


def test_a_view_of_int32_is_a_key_and_a_negative_prefix_is_none() -> None:
    """An int32 memoryview gives a key; a negative prefix length is refused."""
    key = CacheKey(np.array([1, 2, 3], np.int32).data)

    assert key == CacheKey([1, 2, 3])
    with pytest.raises(InvalidKeyError, match="prefix of -1"):
        key.prefix(-1)


@given(parts=st.dictionaries(st.text(), st.one_of(st.text(), st.binary(), st.integers())))
def test_a_namespace_tells_its_parts(parts: dict[str, str | bytes | int]) -> None:
    """`namespace_parts` returns the parts given to `namespace_of`, types included."""
    assert namespace_parts(namespace_of(**parts)) == parts


@given(namespace=st.binary())
def test_any_other_namespace_has_no_parts(namespace: bytes) -> None:
    """`namespace_parts` returns parts only for bytes that `namespace_of` makes from them."""
    parts = namespace_parts(namespace)
    assert not parts or namespace_of(**parts) == namespace
