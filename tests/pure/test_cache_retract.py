"""Drafts that were announced and not kept: their pages come back, unless others rely on them."""

import pytest

from ramify.cache import PrefixCache
from ramify.errors import LeaseError
from tests.pure.test_prefix_cache import begin, drained, key


def test_rejected_drafts_come_back_as_private_pages() -> None:
    """The lease is shorter, the pages are those that were announced, and nobody finds them."""
    cache = PrefixCache(8, 2)
    lease, private = begin(cache, "abcdef")
    announced = cache.announce(lease, key("abcdef"), private)

    kept, pages = cache.retract(announced, 3)

    assert (kept.num_tokens, kept.num_pending, list(kept.pages)) == (2, 1, [private[0]])
    assert list(pages) == list(private[1:])
    assert cache.match(key("abcdefg")).num_pages == 0
    cache.check()
    cache.release(cache.publish(kept, key("ab")), pages)
    assert cache.match(key("abcdefg")).num_pages == 1
    drained(cache)


def test_what_was_not_announced_is_not_retracted() -> None:
    """A lease without pending pages of its own comes back as it is."""
    cache = PrefixCache(8, 2)
    lease, private = begin(cache, "abcdef")

    same, pages = cache.retract(lease, 0)

    assert same is lease and not pages
    cache.release(lease, private)


def test_drafts_that_others_attached_to_stay() -> None:
    """Refused, and nothing has changed; when the follower is gone, it works."""
    cache = PrefixCache(8, 2)
    lease, private = begin(cache, "abcdef")
    lease = cache.announce(lease, key("abcdef"), private)
    follower = cache.attach(key("abcdX"))

    assert cache.can_retract(lease, 4) and not cache.can_retract(lease, 2)
    with pytest.raises(LeaseError, match="others depend on pages"):
        cache.retract(lease, 2)

    cache.release(follower)
    lease, pages = cache.retract(lease, 2)
    assert list(pages) == list(private[1:])
    cache.withdraw(lease)
    cache.release(lease, pages)
    drained(cache)


def test_a_shortened_lease_counts_only_what_is_pending_still() -> None:
    """The leader it followed has published meanwhile."""
    cache = PrefixCache(16, 2)
    leader, private = begin(cache, "abcd")
    leader = cache.announce(leader, key("abcd"), private)
    follower = cache.attach(key("abcdefghi"))
    mine = cache.reserve(2)
    follower = cache.announce(follower, key("abcdefgh"), mine)
    assert follower.num_pending == 4
    leader = cache.publish(leader, key("abcd"))

    follower, pages = cache.retract(follower, 6)

    assert (follower.num_tokens, follower.num_pending, len(pages)) == (6, 1, 1)
    cache.withdraw(follower)
    cache.release(leader)
    cache.release(follower, pages)
    drained(cache)
