"""Prompts with images: the planner knows their tokens by content, not by the ids in their places."""

from array import array
from collections.abc import Sequence

import pytest

from ramify.attention.planner import RadixSequence
from ramify.cache import CacheKey, Media
from ramify.errors import InvalidKeyError
from tests.pure.planner_bench import Bench, pages_of, sequence_of

IMAGE = [9] * 6  # the ids that stand where an image goes, whichever it is


def seen(image: str, text: Sequence[int], *, before: Sequence[int] = (1, 2)) -> RadixSequence:
    """Some text, six tokens of an image, and more text."""
    media = Media(Media.digest_of(image.encode()), len(before), len(IMAGE))
    return RadixSequence(array("i", [*before, *IMAGE, *text]), media=[media])


def test_an_image_is_found_by_its_content() -> None:
    """The same image is read; another one, or text with the same ids, shares what lies before."""
    bench = Bench(num_pages=64, page_size=2)
    bench.run(first := seen("cat", [3, 4, 5]))
    bench.planner.release([first])
    again, other, text = seen("cat", [7, 8, 9]), seen("dog", [3, 4, 5]), sequence_of(first.tokens)

    bench.run(again, other, text)

    assert [one.num_read for one in (again, other, text)] == [8, 2, 2]
    bench.planner.release([again, other, text])
    bench.assert_nothing_leaked()


def test_images_in_one_batch_share_by_content_too() -> None:
    """One computes, those with the same image attach, and no more pages are asked for than used."""
    bench = Bench(num_pages=18, page_size=2)
    batch = [seen("cat", [3, at]) for at in range(3)] + [seen("dog", [3, at]) for at in range(2)]
    for one in batch:
        one.tokens.append(9)

    bench.run(*batch)  # 6 + 2 + 2 pages, and 5 + 2 behind the page that all share

    assert [one.num_shared for one in batch] == [0, 8, 8, 2, 8]
    assert bench.cache.stats().free_pages == 1
    first, *_, dog, _ = (pages_of(bench, one) for one in batch)
    assert first[0] == dog[0]
    assert not set(first[1:]) & set(dog[1:])


def test_a_chunk_may_end_inside_an_image() -> None:
    """Its whole pages are published and read like any others."""
    bench = Bench(num_pages=32, page_size=2)
    one, reader, other = seen("cat", [3, 4, 5]), seen("cat", [6]), seen("dog", [6])

    bench.run(one, num_new=[5])
    bench.run(reader, other)
    bench.run(one)

    assert (reader.num_read, other.num_read) == (4, 2)
    assert bench.cache.match(one.key(11)).num_tokens == 10
    assert bench.cache.match(CacheKey(one.tokens, media=one.media)).num_tokens == 10
    assert bench.cache.match(CacheKey(one.tokens)).num_tokens == 2


def test_a_fork_sees_the_same_image() -> None:
    """What it computes later is published behind the image, not behind its placeholders."""
    bench = Bench(num_pages=32, page_size=2)
    bench.run(one := seen("cat", [3, 4]))
    twin, _ = bench.planner.fork(one)

    for token in (5, 6, 7):
        twin.tokens.append(token)
        bench.plan(twin)
        bench.planner.commit([twin])

    assert bench.cache.match(seen("cat", [3, 4, 5, 6, 7]).key(13)).num_tokens == 12
    assert bench.cache.match(sequence_of(twin.tokens).key(13)).num_tokens == 2


@pytest.mark.parametrize("room", [6, 7])
def test_room_is_counted_by_content(room: int) -> None:
    """`can_allocate` is true just when the plan of two different images succeeds."""
    bench = Bench(num_pages=room, page_size=2)
    batch = [seen("cat", []), seen("dog", [])]  # 4 pages, and 3 behind the page they share

    fits = bench.planner.can_allocate(batch)

    assert fits == (room == 7)
    if fits:
        bench.run(*batch)


@pytest.mark.parametrize("live", [False, True])
def test_an_image_beyond_the_prompt_is_told_before_anything_happens(live: bool) -> None:
    """When planned first, and when the caller cut tokens away that are an image."""
    bench = Bench(num_pages=32, page_size=2)
    good, bad = sequence_of(range(20, 25)), seen("cat", [])
    if live:
        bench.run(bad)
        bench.planner.rollback(bad, 3)
    del bad.tokens[5:]
    before = bench.state()

    with pytest.raises(InvalidKeyError, match="takes atoms 2 to 8 of a prompt of 5"):
        bench.plan(good, bad, num_new=[9, 1])

    assert bench.state() == before
    bench.run(good)


class Counted(RadixSequence):
    """Counts how often its key is made."""

    __slots__ = ("num_keys",)

    def key(self, num_tokens: int) -> CacheKey:
        self.num_keys = getattr(self, "num_keys", 0) + 1
        return super().key(num_tokens)


def test_a_key_is_made_once_for_a_plan() -> None:
    """Pinning, counting, sharing and announcing use one; a decode step makes none."""
    bench = Bench(num_pages=32, page_size=4)
    batch = [Counted(array("i", range(9))) for _ in range(2)]

    bench.plan(*batch)
    assert [one.num_keys for one in batch] == [1, 1]
    bench.planner.commit(batch)
    before = [one.num_keys for one in batch]
    for one in batch:
        one.tokens.append(5)
    bench.plan(*batch)

    assert [one.num_keys for one in batch] == before
