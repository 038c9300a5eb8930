"""Prompts with images: the cache key has an image's content instead of its token ids."""

from array import array
from collections.abc import Sequence

import pytest

from ramify.attention.planner import RadixSequence
from ramify.cache import CacheKey, Media
from ramify.errors import InvalidKeyError
from tests.pure.planner_bench import Bench, pages_of, sequence_of

IMAGE = [9] * 6  # placeholder ids, the same for every image


def prompt_with(
    image: str, text: Sequence[int], *, before: Sequence[int] = (1, 2)
) -> RadixSequence:
    """Some text, six tokens of an image, and more text."""
    media = Media(Media.digest_of(image.encode()), len(before), len(IMAGE))
    return RadixSequence(array("i", [*before, *IMAGE, *text]), media=[media])


def test_an_image_is_found_by_its_content() -> None:
    """The same image hits; another image, or text with the same ids, shares the text before."""
    bench = Bench(num_pages=64, page_size=2)
    bench.run(first := prompt_with("cat", [3, 4, 5]))
    bench.planner.release([first])
    again, other, text = (
        prompt_with("cat", [7, 8, 9]),
        prompt_with("dog", [3, 4, 5]),
        sequence_of(first.tokens),
    )

    bench.run(again, other, text)

    assert [sequence.num_read for sequence in (again, other, text)] == [8, 2, 2]
    bench.planner.release([again, other, text])
    bench.assert_nothing_leaked()


def test_images_in_one_batch_share_by_content_too() -> None:
    """The first computes, those with the same image attach; pages are counted exactly."""
    bench = Bench(num_pages=18, page_size=2)
    batch = [prompt_with("cat", [3, index]) for index in range(3)] + [
        prompt_with("dog", [3, index]) for index in range(2)
    ]
    for sequence in batch:
        sequence.tokens.append(9)

    bench.run(*batch)  # 6 + 2 + 2 pages, and 5 + 2 after the page that all share

    assert [sequence.num_shared for sequence in batch] == [0, 8, 8, 2, 8]
    assert bench.cache.stats().free_pages == 1
    first, *_, dog, _ = (pages_of(bench, sequence) for sequence in batch)
    assert first[0] == dog[0]
    assert not set(first[1:]) & set(dog[1:])


def test_a_chunk_may_end_inside_an_image() -> None:
    """Its full pages are published and reused like any others."""
    bench = Bench(num_pages=32, page_size=2)
    sequence, reader, other = (
        prompt_with("cat", [3, 4, 5]),
        prompt_with("cat", [6]),
        prompt_with("dog", [6]),
    )

    bench.run(sequence, num_new=[5])
    bench.run(reader, other)
    bench.run(sequence)

    assert (reader.num_read, other.num_read) == (4, 2)
    assert bench.cache.match(sequence.key(11)).num_tokens == 10
    assert bench.cache.match(CacheKey(sequence.tokens, media=sequence.media)).num_tokens == 10
    assert bench.cache.match(CacheKey(sequence.tokens)).num_tokens == 2


def test_a_fork_sees_the_same_image() -> None:
    """Later tokens are published after the image's content, not after its placeholders."""
    bench = Bench(num_pages=32, page_size=2)
    bench.run(sequence := prompt_with("cat", [3, 4]))
    twin, _ = bench.planner.fork(sequence)

    for token in (5, 6, 7):
        twin.tokens.append(token)
        bench.plan(twin)
        bench.planner.commit([twin])

    assert bench.cache.match(prompt_with("cat", [3, 4, 5, 6, 7]).key(13)).num_tokens == 12
    assert bench.cache.match(sequence_of(twin.tokens).key(13)).num_tokens == 2


@pytest.mark.parametrize("num_pages", [6, 7])
def test_pages_are_counted_by_content(num_pages: int) -> None:
    """`can_allocate` is true just when the plan of two different images succeeds."""
    bench = Bench(num_pages=num_pages, page_size=2)
    batch = [
        prompt_with("cat", []),
        prompt_with("dog", []),
    ]  # 4 pages, and 3 after the page they share

    fits = bench.planner.can_allocate(batch)

    assert fits == (num_pages == 7)
    if fits:
        bench.run(*batch)


@pytest.mark.parametrize("live", [False, True])
def test_an_image_beyond_the_prompt_is_reported_before_anything_happens(live: bool) -> None:
    """At the first plan, and after the caller cut off tokens of an image."""
    bench = Bench(num_pages=32, page_size=2)
    good, bad = sequence_of(range(20, 25)), prompt_with("cat", [])
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
    """Counts how often its key is built."""

    __slots__ = ("num_keys",)

    def key(self, num_tokens: int) -> CacheKey:
        self.num_keys = getattr(self, "num_keys", 0) + 1
        return super().key(num_tokens)


def test_a_key_is_built_once_per_plan() -> None:
    """Attaching, counting and announcing use the same key; a decode step builds none."""
    bench = Bench(num_pages=32, page_size=4)
    batch = [Counted(array("i", range(9))) for _ in range(2)]

    bench.plan(*batch)
    assert [sequence.num_keys for sequence in batch] == [1, 1]
    bench.planner.commit(batch)
    before = [sequence.num_keys for sequence in batch]
    for sequence in batch:
        sequence.tokens.append(5)
    bench.plan(*batch)

    assert [sequence.num_keys for sequence in batch] == before
