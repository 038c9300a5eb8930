"""What a replica that has just joined should compute before requests come."""

from __future__ import annotations

import pytest

from ramify.cache import CacheKey
from ramify.cluster.hot_prefixes import HALVE_EVERY, HotPrefixes
from ramify.cluster.mirrors import Mirrors
from ramify.errors import ConfigError
from tests.pure.mirrored_replica import joined
from tests.pure.test_prefix_cache import key, serve


def noted(hot: HotPrefixes[str], text: str, num_shared: int, times: int = 1) -> None:
    for _ in range(times):
        hot.note([key(text).packed_hashes(2)], num_shared, text)


def test_the_hottest_prefixes_come_first_and_only_those_that_lack() -> None:
    """By prompts times pages; not what the replica has, nor what was shared once."""
    mirrors, hot = Mirrors(), HotPrefixes[str]()
    replica = joined(mirrors)
    serve(replica.cache, "uvwx")
    replica.message().deliver(mirrors)
    noted(hot, "abcdefgh", 4, times=3)
    noted(hot, "klmn", 2, times=9)
    noted(hot, "uvwxyz", 2, times=50)
    noted(hot, "ponm", 2)

    missing = hot.missing(mirrors, "a", max_pages=100)

    assert [(prefix.prompt, prefix.num_pages, prefix.count) for prefix in missing] == [
        ("klmn", 2, 9),
        ("abcdefgh", 4, 3),
    ]
    assert [prefix.prompt for prefix in hot.missing(mirrors, "a", max_pages=4)] == ["klmn"]


def test_a_prefix_of_a_chosen_prefix_is_computed_with_it() -> None:
    """The longer one is computed once, and pays only for the pages that come on top."""
    mirrors, hot = Mirrors(), HotPrefixes[str]()
    joined(mirrors)
    noted(hot, "abcdefgh", 4, times=5)
    noted(hot, "abcdxy", 2, times=8)
    noted(hot, "abcdefkl", 4, times=2)

    missing = hot.missing(mirrors, "a", max_pages=5)

    assert [prefix.prompt for prefix in missing] == ["abcdefgh", "abcdefkl"]


def test_a_prefix_is_one_in_all_namespaces() -> None:
    """While weights are replaced prompts have two hashes: their prefix is counted and computed once."""
    mirrors, hot = Mirrors(), HotPrefixes[str](limit=2)
    replica = joined(mirrors, "a", 1)
    joined(mirrors, "b", 2)
    old, new = (key("abcdefgh", weights).packed_hashes(2) for weights in ("old", "new"))
    serve(replica.cache, "abcdefgh", "new")
    replica.message().deliver(mirrors)

    for namespaces in ([old], [new], [old, new], [new, old], [new]):
        hot.note(namespaces, 4, "abcdefgh")

    assert len(hot) == 1
    assert hot.missing(mirrors, "a", 100) == []
    [missing] = hot.missing(mirrors, "b", 100)
    assert (missing.prompt, missing.num_pages, missing.count) == ("abcdefgh", 4, 5)
    hot.note([old, new], 2, "abcd")
    assert [prefix.num_pages for prefix in hot.missing(mirrors, "b", 4)] == [4]
    for text in ("klmn", "opqr", "stuv"):
        hot.note([key(text).packed_hashes(2)], 2, text)
    assert (len(hot), len(hot._numbers)) == (2, 2)


def test_rare_prefixes_make_room_for_hot_ones() -> None:
    """Of 200 prefixes the limit of 8 are kept, the hot one among them; memory stays bounded."""
    hot = HotPrefixes[int](limit=8)
    for at in range(200):
        hot.note([CacheKey([at, at]).packed_hashes(1)], 2, at)
        hot.note([CacheKey([7000, 7001]).packed_hashes(1)], 2, -1)

    assert len(hot) == 8
    mirrors = Mirrors()
    joined(mirrors)
    assert hot.missing(mirrors, "a", 100)[0].prompt == -1


def test_what_was_hot_once_is_forgotten() -> None:
    """Counts halve every so many prompts, those without a shared page included."""
    hot = HotPrefixes[str]()
    noted(hot, "abcd", 2, times=3)
    for _ in range(3 * HALVE_EVERY):
        hot.note([b""], 0, "")

    assert len(hot) == 0


@pytest.mark.parametrize("num_shared", [0, 3, -1])
def test_a_prompt_without_shared_pages_is_not_kept(num_shared: int) -> None:
    """Nothing is kept of a prompt that nobody had cached, or of an impossible length."""
    hot = HotPrefixes[str]()

    noted(hot, "abcd", num_shared)

    assert len(hot) == 0


@pytest.mark.parametrize("limit", [0, -1])
def test_at_least_one_prefix_is_kept(limit: int) -> None:
    """A limit below 1 is refused."""
    with pytest.raises(ConfigError, match=f"limit={limit}"):
        HotPrefixes[str](limit)
