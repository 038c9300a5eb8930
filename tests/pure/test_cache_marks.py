"""Marks, the numbers that stand for content: equal hashes in every process, freed when unused."""

import copy
import gc
import hashlib
import os
import pickle
import struct
import subprocess
import sys
from array import array
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ramify
from ramify.cache import CacheKey, Media, PrefixCache, Salt, content_atoms
from ramify.cache.content_atoms import _interned
from ramify.errors import InvalidKeyError
from tests.budget import examples
from tests.pure.test_cache_media import (
    CAT,
    DOG,
    INDICES,
    assert_marks_agree,
    prompt,
    prompts,
    serve,
)

SOURCES = Path(ramify.__file__).parents[1]


def alive() -> set[tuple[bytes, bytes]]:
    """Return (kind, digest) of all marks in use."""
    gc.collect()
    return set(_interned)


# -- names that hold in every process ------------------------------------------------------


def test_page_hashes_of_content_follow_the_rule() -> None:
    """A hash encodes a marked atom as -2 and its continuation as -1, then the page's digests."""
    key = prompt(5, (CAT, 4), 6, 7, 8, salts={6: "s"}, namespace="n")
    salted = hashlib.blake2b(struct.pack("<i", 7), digest_size=32, person=b"ramify-salt")
    salted.update(b"s")
    pages = [
        struct.pack("<4i", 5, -2, -1, -1) + b"media\0" + CAT,
        struct.pack("<4i", -1, 6, -2, 8) + b"salted token\0" + salted.digest(),
    ]
    hashed, expected = hashlib.blake2b(b"n", digest_size=16, person=b"ramify-ns").digest(), []
    for page in pages:
        hashed = hashlib.blake2b(hashed + page, digest_size=16).digest()
        expected.append(hashed)

    assert key.page_hashes(4) == expected


ELSEWHERE = """
from ramify.cache import CacheKey, Media, Salt
others = [CacheKey([0], media=[Media(bytes([i]) * 32, 0, 1)]) for i in range({others})]
media = [Media(Media.digest_of(b"dog"), 5, 2), Media(Media.digest_of(b"cat"), 1, 3)]
key = CacheKey(range(9), "n", media=media, salts=[Salt(0, "s"), Salt(5, "t")])
print(b"".join(key.page_hashes(3)).hex(), key.tokens()[5])
"""


def test_page_hashes_of_content_are_the_same_in_every_process() -> None:
    """Page hashes depend on neither the hash seed nor content seen earlier in the process."""
    media = [Media(CAT, 1, 3), Media(DOG, 5, 2)]
    key = CacheKey(range(9), "n", media=media, salts=[Salt(0, "s"), Salt(5, "t")])
    outputs = []
    for seed, others in (("1", 0), ("2", 7)):
        run = subprocess.run(
            [sys.executable, "-c", ELSEWHERE.format(others=others)],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(SOURCES)},
            check=True,
            capture_output=True,
            text=True,
        )
        outputs.append(run.stdout.split())

    assert [hashes for hashes, _ in outputs] == [b"".join(key.page_hashes(3)).hex()] * 2
    assert outputs[0][1] != outputs[1][1]  # numbers of content_atoms, which are not the same


@pytest.mark.parametrize(
    "clone", [copy.copy, copy.deepcopy, lambda key: pickle.loads(pickle.dumps(key))]
)
def test_a_copy_of_a_key_is_the_same_key(clone: Any) -> None:
    """A copied or unpickled key equals the original, with the same matches and page hashes."""
    key = prompt(1, 2, (CAT, 3), 3, salts={5: "s"}, namespace="n")
    cache = PrefixCache(8, 2)
    serve(cache, key)

    twin = clone(key)

    assert (twin, hash(twin)) == (key, hash(key))
    assert twin.page_hashes(2) == key.page_hashes(2)
    assert cache.match(twin) == cache.match(key)


def test_a_pickled_key_outlives_its_marks() -> None:
    """A key unpickled after its marks were freed equals the original."""
    stored = pickle.dumps(prompt(1, (Media.digest_of(b"stored"), 2), 3, salts={3: "s"}))
    assert (b"media", Media.digest_of(b"stored")) not in alive()

    key = pickle.loads(stored)

    assert key == prompt(1, (Media.digest_of(b"stored"), 2), 3, salts={3: "s"})


PICKLED = """
import pickle, sys
from ramify.cache import CacheKey, Media, Salt
others = [CacheKey([0], media=[Media(bytes([i]) * 32, 0, 1)]) for i in range(200)]
media = [Media(Media.digest_of(b"cat"), 1, 2)]
sys.stdout.buffer.write(pickle.dumps(CacheKey(range(4), "n", media=media, salts=[Salt(1, "s")])))
"""


def test_a_key_pickled_in_another_process_is_the_same_key() -> None:
    """A pickled key stores digests, not mark numbers, which differ between processes."""
    run = subprocess.run(
        [sys.executable, "-c", PICKLED],
        env={**os.environ, "PYTHONPATH": str(SOURCES)},
        check=True,
        capture_output=True,
    )

    assert pickle.loads(run.stdout) == prompt(0, (CAT, 2), 3, salts={1: "s"}, namespace="n")


@given(prompts(), st.integers(0, 40))
def test_a_prefix_of_a_key_has_the_content_that_lies_in_it(
    drawn: tuple[CacheKey, list], cut: int
) -> None:
    """A prefix has the first page hashes and the first marks of the whole key."""
    key, prefix = drawn[0], drawn[0].prefix(cut)

    assert prefix.page_hashes(2) == key.page_hashes(2)[: min(cut, len(key)) // 2]
    assert [at for at, _ in prefix.marks] == [at for at, _ in key.marks if at < cut]


# -- how long a mark lives -----------------------------------------------------------------


@pytest.fixture
def clean() -> Iterator[None]:
    """Assert that the test leaves no new mark."""
    before = alive()
    yield
    assert alive() <= before


def test_a_refused_key_leaves_no_mark() -> None:
    """A key that is refused frees the marks of its first segments."""
    digest = Media.digest_of(b"refused")

    with pytest.raises(InvalidKeyError):
        CacheKey([0] * 8, media=[Media(digest, 0, 2), Media(digest, 1, 2)])

    assert (b"media", digest) not in alive()


@pytest.mark.usefixtures("clean")
def test_a_mark_dies_with_its_last_key() -> None:
    """A mark lives while a key or a prefix of it does, and no longer."""
    for i in range(20):
        key = prompt((Media.digest_of(b"seen", i), 2), 1, salts={2: f"{i}"})
        prefix = key.prefix(2)
        del key
        assert (b"media", Media.digest_of(b"seen", i)) in alive()
        del prefix


@pytest.mark.usefixtures("clean")
@INDICES
def test_a_mark_lives_as_long_as_a_page_that_has_it(index: str) -> None:
    """Cached pages and ghosts keep their mark, so that the same image hits again."""
    digest = Media.digest_of(b"kept")
    cache = PrefixCache(8, 2, index=index)
    serve(cache, prompt(1, 2, (digest, 3), 3))

    assert (b"media", digest) in alive()
    assert cache.match(prompt(1, 2, (digest, 3), 3, 4)).num_pages == 3
    assert cache.evict(2) == 2
    assert (b"media", digest) in alive()
    assert serve(cache, prompt(1, 2, (digest, 3), 3)).num_tokens == 6
    assert cache.stats().ideal_hit_tokens == 4  # the last page is computed in any case
    assert_marks_agree(cache)


@pytest.mark.usefixtures("clean")
@INDICES
def test_a_mark_dies_with_the_last_memory_of_its_page(index: str) -> None:
    """Evicting an image's page frees its mark, also when the text before it stays."""
    digest = Media.digest_of(b"gone")
    cache = PrefixCache(8, 2, index=index, ghost_pages=0)
    serve(cache, prompt(1, 2, 3, 4, (digest, 2)))

    cache.evict(1)

    assert (b"media", digest) not in alive()
    assert cache.match(prompt(1, 2, 3, 4, (digest, 2))).num_pages == 2
    assert_marks_agree(cache)


@pytest.mark.usefixtures("clean")
@INDICES
@pytest.mark.parametrize("ghost_pages", [0, 3, 100])
@settings(max_examples=examples(40))
@given(
    steps=st.lists(st.tuples(prompts(), st.integers(0, 6), st.booleans()), max_size=12),
    page_size=st.integers(1, 3),
)
def test_marks_follow_their_atoms_through_splits_evictions_and_revivals(
    index: str, ghost_pages: int, steps: list, page_size: int
) -> None:
    """Nodes keep the right marks through splits, evictions, withdrawals and revivals."""
    cache = PrefixCache(40, page_size, index=index, ghost_pages=ghost_pages)

    for (key, _), evicted, pending in steps:
        if pending:  # announced, attached to in part, and taken back
            leader = cache.acquire(key)
            private = cache.reserve(len(key) // page_size - len(leader.pages))
            leader = cache.announce(leader, key, private)
            follower = cache.attach(key.prefix(len(key) // 2 + 1))
            assert_marks_agree(cache)
            cache.withdraw(leader)
            assert_marks_agree(cache)
            cache.release(follower)
            taken = bool(private) and not cache.is_free(private[0])
            cache.release(leader, private if taken else [])
        serve(cache, key, step=page_size * (1 + evicted % 2))
        assert_marks_agree(cache)
        cache.evict(evicted)
        assert_marks_agree(cache)
        assert cache.match(key).num_pages <= (len(key) - 1) // page_size


def test_a_number_is_given_again_when_nothing_uses_it() -> None:
    """A mark's number is reused only when no key and no cached page uses it."""
    kept = prompt(1, salts={0: "kept"})
    atoms = {prompt(1, salts={0: f"{at}"}).atoms for at in range(100)}

    assert len(atoms) < 10
    assert kept.atoms not in atoms
    cache = PrefixCache(8, 1)
    serve(cache, kept)
    del kept
    for at in range(100):
        assert cache.match(prompt(1, 2, salts={0: f"{at}"})).num_tokens == 0
    assert cache.match(prompt(1, 2, salts={0: "kept"})).num_tokens == 1


def test_when_all_numbers_are_used_new_content_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all numbers in use, new content is refused and known content still works."""
    old = prompt(1, (b"o" * 32, 2))
    monkeypatch.setattr(content_atoms, "_LAST", 2)

    assert prompt(1, (b"o" * 32, 2)) == old
    monkeypatch.setattr(content_atoms, "_free_numbers", [])
    with pytest.raises(InvalidKeyError, match="in use"):
        prompt(1, (b"n" * 32, 2))


def test_threads_that_make_the_same_mark_have_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that enters the lock second gets the mark that the first thread made."""
    kind, digest, theirs, lock = (
        b"media\0",
        b"t" * 32,
        list[content_atoms.ContentAtom](),
        content_atoms._interning_lock,
    )

    class Overtaken:
        def __enter__(self) -> None:
            monkeypatch.setattr(content_atoms, "_interning_lock", lock)
            theirs.append(content_atoms.intern_content(kind, digest))

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(content_atoms, "_interning_lock", Overtaken())

    assert content_atoms.intern_content(kind, digest) is theirs[0]


def test_a_page_is_spelled_the_same_on_big_endian_hardware(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Atoms are hashed as little-endian, whatever the machine's byte order."""
    page = array("i", [1, 2, 3])
    here = content_atoms.bytes_for_hash(page.tobytes(), ())
    page.byteswap()
    monkeypatch.setattr(content_atoms, "sys", SimpleNamespace(byteorder="big"))

    assert content_atoms.bytes_for_hash(page.tobytes(), ()) == here
