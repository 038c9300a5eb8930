"""Images, audio and salts in prompts: equal content shares pages, different content never does.

Tags such as P45, PB24 and AB28 number the contracts and the faults of earlier systems.
"""

import hashlib
from array import array
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.cache import CacheKey, Lease, Media, PrefixCache, Salt
from ramify.cache.content_atoms import CONTINUED
from ramify.cache.packed import common_pages
from ramify.errors import InvalidKeyError
from tests.budget import examples

PLACEHOLDER = 9
CAT, DOG = Media.digest_of(b"cat"), Media.digest_of(b"dog")
INDICES = pytest.mark.parametrize("index", ["radix", "hash"])

Image = tuple[bytes, int]  # digest, number of atoms
Part = int | Image  # a text token or an image


def prompt(*parts: Part, salts: dict[int, str] | None = None, namespace: str = "") -> CacheKey:
    """A key of text tokens and images in reading order."""
    tokens, media = list[int](), list[Media]()
    for part in parts:
        if isinstance(part, int):
            tokens.append(part)
        else:
            media.append(Media(part[0], len(tokens), part[1]))
            tokens += [PLACEHOLDER] * part[1]
    salted = [Salt(start, salt) for start, salt in (salts or {}).items()]
    return CacheKey(tokens, namespace, media=media, salts=salted)


def serve(cache: PrefixCache, key: CacheKey, step: int = 1000) -> Lease:
    """Publish a key `step` tokens at a time; returns the last lease, already released."""
    lease = cache.acquire(key)
    private = cache.reserve(-(-len(key) // cache.page_size) - len(lease.pages))
    while lease.num_tokens < len(key) // cache.page_size * cache.page_size:
        new = cache.publish(lease, key.prefix(lease.num_tokens + step), private)
        private = private[len(new.pages) - len(lease.pages) :]
        lease = new
    cache.release(lease, private)
    return lease


def assert_marks_agree(cache: PrefixCache) -> None:
    """Check that the content atoms of the tree, and no others, have marks."""
    cache.check()
    tree = cache._tree
    nodes = list(tree.nodes())
    assert set(tree.content) <= set(nodes)
    for node in nodes:
        atoms = array("i", tree.edge(node))
        standing = {at: atom for at, atom in enumerate(atoms) if atom < CONTINUED}
        assert {at: mark.atom for at, mark in tree.content.get(node, ())} == standing


# -- what is equal and what is not ---------------------------------------------------------


def symbols(parts: list[Part], salts: dict[int, str]) -> list[Any]:
    """The meaning of each atom: token, or digest and offset; with any salt that begins there."""
    meanings: list[Any] = []
    for part in parts:
        meanings += [part] if isinstance(part, int) else [(part[0], k) for k in range(part[1])]
    return [(meaning, salts[at]) if at in salts else meaning for at, meaning in enumerate(meanings)]


def starts(parts: list[Part]) -> list[int]:
    """Positions where a salt may begin: anywhere but inside an image."""
    positions, at = [], 0
    for part in parts:
        positions.append(at)
        at += 1 if isinstance(part, int) else part[1]
    return positions


PARTS: st.SearchStrategy[list[Part]] = st.lists(
    st.integers(0, 1) | st.tuples(st.sampled_from([CAT, DOG]), st.integers(1, 4)),
    min_size=1,
    max_size=8,
)


@st.composite
def prompts(draw: st.DrawFn) -> tuple[CacheKey, list[Any]]:
    parts = draw(PARTS)
    where = draw(st.lists(st.sampled_from(starts(parts)), max_size=2, unique=True))
    salts = {at: draw(st.sampled_from(["one", "two"])) for at in where}
    return prompt(*parts, salts=salts), symbols(parts, salts)


@given(prompts(), prompts(), st.integers(1, 3))
def test_p45_pb24_keys_share_just_what_means_the_same(
    left: tuple[CacheKey, list], right: tuple[CacheKey, list], page_size: int
) -> None:
    """Atoms and page hashes agree as far as text, content and salts do, and no further."""
    (first, meant), (second, meant_too) = left, right
    same = [a == b for a, b in zip(meant, meant_too, strict=False)]
    shared = (same.index(False) if False in same else len(same)) // page_size

    hashes = zip(first.page_hashes(page_size), second.page_hashes(page_size), strict=False)

    assert common_pages(first.atoms, second.atoms, page_size * 4) == shared
    assert [a == b for a, b in hashes].count(True) == shared
    assert (first == second) == (meant == meant_too)


@INDICES
@settings(max_examples=examples(50))
@given(left=prompts(), right=prompts(), page_size=st.integers(1, 3))
def test_ab28_a_lookup_finds_just_what_means_the_same(
    index: str, left: tuple[CacheKey, list], right: tuple[CacheKey, list], page_size: int
) -> None:
    """`match` hits the whole pages of equal meaning that two prompts share, with either index."""
    cache = PrefixCache(64, page_size, index=index)
    serve(cache, left[0])
    same = [a == b for a, b in zip(left[1], right[1], strict=False)]
    shared = (same.index(False) if False in same else len(same)) // page_size

    num_pages = cache.match(right[0]).num_pages

    assert num_pages == min(shared, (len(right[1]) - 1) // page_size)
    assert_marks_agree(cache)


@INDICES
def test_ab28_two_images_of_one_size_never_share(index: str) -> None:
    """The same text around another image: the hit ends before the page in which it begins."""
    cache = PrefixCache(32, 2, index=index)
    serve(cache, prompt(1, 2, 3, (CAT, 4), 4, 5, 6))

    assert cache.match(prompt(1, 2, 3, (DOG, 4), 4, 5, 6)).num_tokens == 2
    assert cache.match(prompt(1, 2, 3, (CAT, 4), 4, 5, 6)).num_tokens == 8
    assert cache.match(prompt(1, 2, 3, *[PLACEHOLDER] * 4, 4, 5, 6)).num_tokens == 2


def test_pb24_the_same_image_is_one_content_wherever_it_came_from() -> None:
    """A key ignores placeholder ids, the image's source and the order of the media list."""
    cat = Media(Media.digest_of(b"cat"), 1, 2)
    dog = Media(DOG, 4, 1)

    assert CacheKey([1, 7, 8, 2, 9], media=[cat, dog]) == prompt(1, (CAT, 2), 2, (DOG, 1))
    assert CacheKey([1, 0, 0, 2, 0], media=[dog, cat]) == prompt(1, (CAT, 2), 2, (DOG, 1))


def test_pb24_no_text_is_an_image() -> None:
    """Token ids are never negative, and content atoms always are."""
    key = prompt(0, (CAT, 3), 2**31 - 1)

    assert [atom < 0 for atom in key.tokens()] == [False, True, True, True, False]
    with pytest.raises(InvalidKeyError, match="negative"):
        CacheKey(key.atoms)


def test_pb24_one_image_of_20_atoms_is_not_two_of_10() -> None:
    """A 20-atom image and two 10-atom images share the first 10 atoms and no page after them."""
    whole, halves = prompt((CAT, 20), 1), prompt((CAT, 10), (CAT, 10), 1)

    assert len(whole) == len(halves)
    assert common_pages(whole.atoms, halves.atoms, 4) == 10
    assert whole.page_hashes(5)[:2] == halves.page_hashes(5)[:2]
    assert set(whole.page_hashes(5)[2:]).isdisjoint(halves.page_hashes(5)[2:])


def test_pb24_images_that_differ_in_one_bit_share_nothing() -> None:
    """All 256 bits of a digest count, in the middle of an image as at its beginning."""
    flipped = [bytes([*CAT[:i], CAT[i] ^ 1, *CAT[i + 1 :]]) for i in range(32)]
    keys = [prompt((digest, 3)) for digest in (CAT, *flipped)]

    assert len({key.atoms for key in keys}) == 33
    assert len({key.page_hashes(3)[0] for key in keys}) == 33


def test_namespaces_keep_images_apart_too() -> None:
    """An image in one namespace never hits the same image in another."""
    cache = PrefixCache(8, 1)
    serve(cache, prompt((CAT, 3), 1, namespace="one"))

    assert cache.match(prompt((CAT, 3), 1, namespace="two")).num_pages == 0
    assert cache.match(prompt((CAT, 3), 1, namespace="one")).num_pages == 3


def test_a_digest_names_the_content_and_every_setting() -> None:
    """BLAKE2b-256, each part framed by its type and length: no two lists of parts look alike."""
    lists: list[tuple[Any, ...]] = [
        (b"cat",),
        (b"cat", 1),
        (b"cat", "1"),
        (b"cat", b"1"),
        (b"cat", 11),
        (b"cat", 1, 1),
        (b"cat", "high", "x"),
        (b"cat", "highx"),
        (b"catint", 1),
        (b"",),
    ]
    framed = b"".join(
        kind + len(raw).to_bytes(8, "big") + raw
        for kind, raw in ((b"bytes", b"cat"), (b"str", b"'high'"), (b"int", b"448"))
    )

    assert len({Media.digest_of(*parts) for parts in lists}) == len(lists)
    assert Media.digest_of(b"cat", "high", 448) == (
        hashlib.blake2b(framed, digest_size=32, person=b"ramify-media").digest()
    )


# -- salts ---------------------------------------------------------------------------------


@INDICES
def test_a_salt_makes_the_tail_private_and_leaves_the_head_shared(index: str) -> None:
    """Pages before the salt hit for any salt; pages after it hit for the same salt only."""
    cache = PrefixCache(32, 2, index=index)
    serve(cache, prompt(*range(9), salts={4: "tenant a"}))

    for salts, num_tokens in [
        ({4: "tenant a"}, 8),
        ({4: "tenant b"}, 4),
        ({}, 4),
        ({5: "tenant a"}, 4),
        ({2: "tenant a"}, 2),
        ({4: "tenant a", 6: "x"}, 6),
        ({0: "tenant a", 4: "tenant a"}, 0),
    ]:
        assert cache.match(prompt(*range(9), salts=salts)).num_tokens == num_tokens
    assert_marks_agree(cache)


def test_two_tenants_share_the_pages_of_the_public_prefix() -> None:
    """Two salts share the pages of the public prefix and no page after it."""
    cache = PrefixCache(32, 2)
    first = serve(cache, prompt(*range(9), salts={4: "a"}))
    second = serve(cache, prompt(*range(9), salts={4: "b"}))

    assert first.pages[:2] == second.pages[:2]
    assert set(first.pages[2:]).isdisjoint(second.pages[2:])


def test_a_salt_is_text_or_its_utf8() -> None:
    """Like a namespace; an empty salt is a salt, too."""
    assert prompt(1, 2, salts={1: "é"}) == CacheKey([1, 2], salts=[Salt(1, "é".encode())])
    assert prompt(1, 2, salts={1: ""}) != prompt(1, 2)


def test_salts_and_media_together() -> None:
    """An image may be salted where it begins; salted text is never salted content."""
    keys = [
        prompt(1, (CAT, 2), 3),
        prompt(1, (DOG, 2), 3),
        prompt(1, (CAT, 2), 3, salts={1: "s"}),
        prompt(1, (DOG, 2), 3, salts={1: "s"}),
        prompt(1, PLACEHOLDER, PLACEHOLDER, 3, salts={1: "s"}),
        prompt(1, (CAT, 2), 3, salts={1: "t"}),
        prompt(1, (CAT, 2), 3, salts={1: "s", 3: "t"}),
        prompt(1, (CAT, 2), 3, salts={3: "t"}),
    ]

    assert len({key.atoms for key in keys}) == len(keys)
    assert len({tuple(key.page_hashes(4)) for key in keys}) == len(keys)


# -- what is refused -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("media", "named"),
    [
        ([(2, 3), (4, 2)], "begins at 4 but the one before ends at 5"),
        ([(4, 2), (2, 3)], "begins at 4 but the one before ends at 5"),
        ([(2, 3), (2, 3)], "begins at 2 but the one before ends at 5"),
        ([(0, 8), (7, 1)], "begins at 7 but the one before ends at 8"),
        ([(6, 3)], "atoms 6 to 9 of a prompt of 8"),
        ([(8, 1)], "atoms 8 to 9 of a prompt of 8"),
        ([(-1, 2)], "atoms -1 to 1 of a prompt of 8"),
        ([(3, 0)], "atoms 3 to 3 of a prompt of 8"),
        ([(3, -1)], "atoms 3 to 2 of a prompt of 8"),
        ([(0, 9)], "atoms 0 to 9 of a prompt of 8"),
    ],
)
def test_p45_pb25_a_segment_in_the_wrong_place_is_refused_by_its_numbers(
    media: list[tuple[int, int]], named: str
) -> None:
    """The error gives an overlap's positions, or the prompt's length for a segment outside it."""
    with pytest.raises(InvalidKeyError, match=named):
        CacheKey([0] * 8, media=[Media(CAT, start, length) for start, length in media])


@pytest.mark.parametrize("start", ["0", 0.0, None])
def test_pb25_a_position_that_is_no_integer_is_refused(start: Any) -> None:
    """A position that is not an integer raises InvalidKeyError."""
    with pytest.raises(InvalidKeyError):
        CacheKey([0, 1], media=[Media(CAT, start, 1)])


@pytest.mark.parametrize("salt", [5, None, 1.5])
def test_a_salt_of_another_type_is_refused(salt: Any) -> None:
    """A salt that is neither str nor bytes raises InvalidKeyError."""
    with pytest.raises(InvalidKeyError):
        CacheKey([1], salts=[Salt(0, salt)])


@pytest.mark.parametrize("digest", [b"", CAT[:31], CAT + b"\0", CAT.hex(), None, bytearray(CAT)])
def test_pb25_a_digest_that_is_none_is_refused(digest: Any) -> None:
    """A digest that is not 32 bytes raises an error that names `Media.digest_of`."""
    with pytest.raises(InvalidKeyError, match=r"segment at 3 .* not 32 bytes; Media\.digest_of"):
        CacheKey([0] * 8, media=[Media(digest, 3, 2)])


@pytest.mark.parametrize(
    ("salts", "named"),
    [
        ([8], "begins at 8 of a prompt of 8"),
        ([-1], "begins at -1 of a prompt of 8"),
        ([3], "begins at 3 of a prompt of 8"),
        ([1, 1], "begins at 1 of a prompt of 8"),
        ([2, 2], "begins at 2 of a prompt of 8"),
    ],
)
def test_a_salt_in_the_wrong_place_is_refused_by_its_numbers(salts: list[int], named: str) -> None:
    """A salt outside the prompt, inside an image or at a position twice raises InvalidKeyError."""
    image = Media(CAT, 2, 3)

    with pytest.raises(InvalidKeyError, match=named):
        CacheKey([0] * 8, media=[image], salts=[Salt(start, "s") for start in salts])
