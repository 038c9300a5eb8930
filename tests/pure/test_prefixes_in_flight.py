"""Prefixes that replicas compute at the moment: what a prompt shares with them."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.cache import CacheKey
from ramify.cache.key import split_hashes
from ramify.cluster.prefixes_in_flight import DEPTH_STEPS, Edge, PrefixesInFlight
from tests.budget import examples


def hashes_of(*tokens: int) -> bytes:
    return CacheKey(tokens).packed_hashes(1)


def draw_prompt(random: Random) -> bytes:
    """One of four stems, cut off somewhere, and something of its own behind it."""
    stem, length = random.randrange(4), random.choice((3, 20, 200))
    own = [random.randrange(3) for _ in range(random.randrange(length))]
    return hashes_of(*[stem] * random.randrange(length), *own)


@settings(max_examples=examples(200), deadline=None)
@given(seed=st.integers(0, 2**32))
def test_it_is_the_longest_prefix_that_a_request_shares(seed: int) -> None:
    """Of each replica, down to a page at which prefixes are compared; nothing is left of what ended."""
    random, prefixes = Random(seed), PrefixesInFlight()
    compared = {0}
    for (begin, _), (end, step) in zip(((0, 0), *DEPTH_STEPS), DEPTH_STEPS, strict=False):
        compared |= set(range(begin + step, min(end, 500) + 1, step))
    live: list[tuple[str, bytes, Edge | None]] = []
    for replica in "abc":
        prefixes.join(replica)
    for _ in range(40):
        if live and random.random() < 0.4:
            replica, _, noted = live.pop(random.randrange(len(live)))
            prefixes.remove(replica, noted)
        else:
            replica, prompt = random.choice("abc"), draw_prompt(random)
            live.append((replica, prompt, prefixes.add(replica, prompt)))
        prompt = draw_prompt(random)
        expected = dict.fromkeys("abc", 0)
        for replica, other, _ in live:
            pages = zip(split_hashes(prompt), split_hashes(other), strict=False)
            num_shared = sum(page == own for page, own in pages)
            depth = max(depth for depth in compared if depth <= num_shared)
            expected[replica] = max(depth, expected[replica])

        assert prefixes.match(prompt) == {name: at for name, at in expected.items() if at}
    for replica, _, noted in live:
        prefixes.remove(replica, noted)

    assert len(prefixes) == 0


def test_many_requests_behind_one_prefix_take_an_edge_each() -> None:
    """However many replicas and requests share its 600 pages, and in whatever order they end."""
    prefixes, random = PrefixesInFlight(), Random(1)
    stem = [7] * 600
    names = [f"replica-{number}" for number in range(100)]
    for name in names:
        prefixes.join(name)
    live = [
        (name, prefixes.add(name, hashes_of(*stem, *range(number, number + 40))))
        for number, name in enumerate(names * 3)
    ]

    assert len(prefixes) <= 1 + len(live)
    assert prefixes.match(hashes_of(*stem)) == dict.fromkeys(names, 576)
    random.shuffle(live)
    while live:
        prefixes.remove(*live.pop())
    assert len(prefixes) == 0


def test_a_place_is_used_again() -> None:
    """Replicas that come and go take no more digits than there are at once."""
    prefixes = PrefixesInFlight()
    for number in range(50):
        name = f"replica-{number}"
        prefixes.join(name)
        prefixes.join(name)
        noted = prefixes.add(name, hashes_of(1, 2, 3))
        assert prefixes.match(hashes_of(1, 2, 4)) == {name: 2}
        prefixes.remove(name, noted)
        prefixes.leave(name)

    assert prefixes._names == ["replica-49"]


def test_a_prompt_without_a_page_has_nothing() -> None:
    """Shorter than a page, it neither shares nor is noted."""
    prefixes = PrefixesInFlight()
    prefixes.join("a")

    assert prefixes.add("a", b"") is None
    assert prefixes.match(b"") == {}
    prefixes.remove("a", None)
    assert len(prefixes) == 0
