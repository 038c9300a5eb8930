"""Invalid keys, leases, content and numbers raise one clear error and change nothing."""

import pickle
from collections.abc import Callable
from typing import Any

import pytest

from ramify.cache import CacheKey, Media, PrefixCache, Salt, namespace_of
from ramify.errors import (
    CacheError,
    ConfigError,
    InvalidKeyError,
    InvalidParamsError,
    LeaseError,
    OutOfPagesError,
    RamifyError,
    TokensWaitError,
    UnknownOptionError,
    UnknownParamError,
    UnknownRequestError,
)
from tests.pure.test_prefix_cache import begin, key, serve, state


class Number:
    """An integer type of another package: it has `__index__` only."""

    def __init__(self, value: int) -> None:
        self._value = value

    def __index__(self) -> int:
        return self._value


# -- keys and leases -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        lambda cache, lease, it: cache.match(it),
        lambda cache, lease, it: cache.explain(it),
        lambda cache, lease, it: cache.acquire(it),
        lambda cache, lease, it: cache.attach(it),
        lambda cache, lease, it: cache.can_allocate(it),
        lambda cache, lease, it: cache.pin(it, "me"),
        lambda cache, lease, it: cache.set_priority(it, 1),
        lambda cache, lease, it: cache.announce(lease, it, ()),
        lambda cache, lease, it: cache.publish(lease, it),
    ],
)
@pytest.mark.parametrize("it", [[1, 2, 3], b"abcd", None])
def test_token_ids_are_no_key(call: Callable[..., object], it: Any) -> None:
    """Bare token ids are refused with an error that shows how to build a CacheKey."""
    cache = PrefixCache(8, 2)
    serve(cache, "abcdef")
    lease = cache.acquire(key("abcde"))
    before = state(cache)

    with pytest.raises(InvalidKeyError, match=r"is not a CacheKey; make one .* CacheKey\(ids\)"):
        call(cache, lease, it)

    assert state(cache) == before
    cache.check()


@pytest.mark.parametrize("it", [None, 5, key("abcd")])
def test_what_is_no_lease_is_refused(it: Any) -> None:
    """A value that is not a lease raises LeaseError."""
    cache = PrefixCache(8, 2)

    for call in (cache.release, cache.fork, cache.cancel, cache.withdraw, cache.is_blocked):
        with pytest.raises(LeaseError, match="is not a lease"):
            call(it)


@pytest.mark.parametrize("num_tokens", [5.0, "5", None, -1])
def test_a_retraction_to_no_number_of_tokens_changes_nothing(num_tokens: Any) -> None:
    """`retract` with an invalid token count raises and keeps the announced pages."""
    cache = PrefixCache(8, 2)
    lease, private = begin(cache, "abcdefg")
    lease = cache.announce(lease, key("abcdefg"), private)
    before = state(cache)

    with pytest.raises(ConfigError, match="num_tokens="):
        cache.retract(lease, num_tokens)

    assert state(cache) == before
    cache.check()


# -- numbers -------------------------------------------------------------------------------


def test_integers_of_other_packages_are_integers() -> None:
    """Any type with `__index__` is accepted as an integer."""
    cache = PrefixCache(Number(8), Number(2), policy="priority")  # type: ignore[arg-type]
    serve(cache, "abcdef")
    pin = cache.pin(key("abcd"), "me")

    assert cache.page_size == 2
    assert type(cache.page_size) is int
    assert cache.set_priority(key("abcdef"), Number(3)) == 4  # type: ignore[arg-type]
    cache.unpin(Number(pin.id))  # type: ignore[arg-type]
    media = Media(b"d" * 32, Number(1), Number(2))  # type: ignore[arg-type]
    salt = Salt(Number(4), "s")  # type: ignore[arg-type]
    assert CacheKey(range(6), media=[media], salts=[salt]) == CacheKey(
        range(6), media=[Media(b"d" * 32, 1, 2)], salts=[Salt(4, "s")]
    )


@pytest.mark.parametrize("num_pages", [1.5, "1", None])
def test_what_is_no_number_of_pages_cannot_be_asked_for(num_pages: Any) -> None:
    """`can_reserve` raises for a value that is no whole number, and is false below 0."""
    cache = PrefixCache(8, 2)

    with pytest.raises(ConfigError, match="whole number"):
        cache.can_reserve(num_pages)
    assert not cache.can_reserve(-1)
    assert cache.can_reserve(8) > cache.can_reserve(9)


def test_a_time_to_live_beyond_all_floats_is_for_ever() -> None:
    """A TTL beyond the float range never expires, and `unpin` still ends it."""
    cache = PrefixCache(8, 2)
    serve(cache, "abcdef")

    pin = cache.pin(key("abcd"), "me", ttl=10**400)

    assert [listed_pin.id for listed_pin in cache.pins()] == [pin.id]
    cache.unpin(pin)
    assert cache.evict(8) == 3


@pytest.mark.parametrize("clock", [None, 5])
def test_a_clock_that_cannot_be_read_is_refused(clock: Any) -> None:
    """A clock that is not callable is refused by the constructor."""
    with pytest.raises(ConfigError, match="clock="):
        PrefixCache(8, 2, clock=clock)


# -- content -------------------------------------------------------------------------------


class Pixels:
    """An object whose repr leaves out part of its content, as an array's does."""

    def __repr__(self) -> str:
        return "Pixels(...)"


@pytest.mark.parametrize("content", [Pixels(), [1, 2, 3], "text", 5, None])
def test_content_that_is_no_bytes_has_no_digest(content: Any) -> None:
    """`digest_of` refuses content that is not bytes: two images could get one digest."""
    with pytest.raises(InvalidKeyError, match="not bytes"):
        Media.digest_of(content)


@pytest.mark.parametrize("setting", [Pixels(), (1, 2), [1]])
def test_a_setting_must_say_all_of_itself(setting: Any) -> None:
    """A setting must be text, bytes, a number or None, and changes the digest."""
    with pytest.raises(InvalidKeyError, match="a setting is a"):
        Media.digest_of(b"cat", setting)
    assert Media.digest_of(b"cat", 0.5) != Media.digest_of(b"cat", True) != Media.digest_of(b"cat")


def test_bytes_are_bytes_in_whatever_they_come() -> None:
    """bytes, bytearray and non-contiguous memoryviews of equal content have one digest."""
    assert (
        Media.digest_of(b"cat")
        == Media.digest_of(bytearray(b"cat"))
        == Media.digest_of(memoryview(b"c.a.t.")[::2])
    )


@pytest.mark.parametrize("placeholder", [-1, -200, 151655])
def test_placeholders_may_be_any_ids(placeholder: int) -> None:
    """Placeholder ids inside a media range do not matter and may be negative."""
    image = Media(b"d" * 32, 1, 2)
    ids = [7, placeholder, placeholder, 8]

    assert CacheKey(ids, media=[image]) == CacheKey([7, 9, 9, 8], media=[image])
    if placeholder < 0:
        with pytest.raises(InvalidKeyError, match=f"token id {placeholder} is negative"):
            CacheKey([*ids, placeholder], media=[image])


def test_segments_may_come_one_by_one() -> None:
    """`media` and `salts` may be iterators."""
    image, salt = Media(b"d" * 32, 1, 2), Salt(3, "s")

    key_of_all = CacheKey(range(5), media=iter([image]), salts=iter([salt]))  # type: ignore[arg-type]

    assert key_of_all == CacheKey(range(5), media=[image], salts=[salt])
    assert len(key_of_all.marks) == 2


@pytest.mark.parametrize("segments", [[5], [(b"d" * 32, 0, 1)]])
def test_a_segment_or_salt_of_another_kind_is_refused(segments: Any) -> None:
    """`media` accepts Media only, and `salts` accepts Salt only."""
    with pytest.raises(InvalidKeyError, match="is not a Media"):
        CacheKey([1, 2], media=segments)
    with pytest.raises(InvalidKeyError, match="is not a Salt"):
        CacheKey([1, 2], salts=segments)


def test_a_number_too_long_to_write_is_no_part_of_a_namespace() -> None:
    """A namespace number too long for `str` raises InvalidKeyError."""
    with pytest.raises(InvalidKeyError, match="epoch is not a namespace part"):
        namespace_of(epoch=10**5000)


# -- errors --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        OutOfPagesError(5, 1, 2, 8, ((3, "ann", 2),)),
        UnknownOptionError("n_ctx", ["page_size"], "use max_model_len"),
        UnknownParamError("SamplingParams", "best_of", ["n"], "use n"),
        InvalidParamsError("top_p", 2, "a number in (0, 1]"),
        UnknownRequestError(7),
        TokensWaitError(10, 5, 12, 2.5),
        CacheError("told"),
    ],
)
def test_an_error_tells_another_process_what_it_told_here(error: RamifyError) -> None:
    """A pickled error keeps its type, message and attributes."""
    there = pickle.loads(pickle.dumps(error))

    assert type(there) is type(error)
    assert str(there) == str(error)
    assert vars(there) == vars(error)
