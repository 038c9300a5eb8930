"""The store of requests: texts come back, hashes compose, memory is bounded."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ramify.analysis.corpus import Corpus
from ramify.analysis.records import LoggedRequest, Segment, SegmentKind, TextForm
from ramify.analysis.tokens import PrefixHasher, spread_ids

TEXTS = st.lists(st.text(max_size=30), max_size=6)


def request_of(texts: list[str]) -> LoggedRequest:
    segments = tuple(
        Segment(f"messages[{at}]", SegmentKind.MESSAGE, text, label="user")
        for at, text in enumerate(texts)
    )
    return LoggedRequest("log.jsonl", 1, segments=segments)


@given(st.lists(TEXTS, max_size=8), st.sampled_from([0, 60, 1 << 20]))
def test_texts_come_back_from_memory_or_disk(prompts: list[list[str]], memory_bytes: int) -> None:
    """Every text is read back whole, whatever fits into memory, and equal texts are one unit."""
    corpus = Corpus(memory_bytes=memory_bytes)

    stored = [corpus.add(request_of(texts)) for texts in prompts]

    for texts, request in zip(prompts, stored, strict=True):
        assert [corpus.text(int(unit)) for unit in request.units] == texts
    assert len(corpus.units) == len({text for texts in prompts for text in texts})


@given(TEXTS)
def test_prompt_hash_is_composed_of_unit_hashes(texts: list[str]) -> None:
    """The hash of a prompt follows from lengths and hashes of its units."""
    corpus = Corpus()
    request = corpus.add(request_of(texts))
    # hash([0, 1]) = m
    multiplier = int(corpus.hasher.prefix_hashes(np.array([0, 1], np.uint64))[-1])

    composed = length = 0
    for number in request.units:
        unit_hash = int(corpus.hasher.prefix_hashes(corpus.tokens(int(number)))[-1])
        composed += pow(multiplier, length, 1 << 64) * unit_hash
        length += corpus.units[int(number)].num_tokens

    parts = [corpus.tokens(int(unit)) for unit in request.units]
    tokens = np.concatenate([np.zeros(0, np.uint64), *parts])
    assert length == len(tokens) == corpus.num_tokens(request)
    assert composed % (1 << 64) == int(corpus.hasher.prefix_hashes(tokens)[-1])


def test_token_ids_are_tokens() -> None:
    """A prompt logged as token ids has as many tokens, equal where the ids are."""
    corpus = Corpus()
    segment = Segment("prompt", SegmentKind.MESSAGE, "5 0 5", TextForm.TOKENS)

    tokens = corpus.tokens(corpus.unit_of(segment))

    assert len(tokens) == 3
    assert tokens[0] == tokens[2] != tokens[1]


def test_small_ids_have_different_prefix_hashes() -> None:
    """No two of the prefixes of all pairs of small ids collide."""
    hasher = PrefixHasher()
    pairs = [(a, b) for a in range(60) for b in range(60)]

    hashes = {int(hasher.prefix_hashes(spread_ids(np.array(pair)))[-1]) for pair in pairs}

    assert len(hashes) == len(pairs)


def test_segments_that_requests_share_have_one_unit() -> None:
    """The same object, an equal object and another one, also when few are remembered."""
    corpus = Corpus(memory_bytes=2000)
    shared = [Segment(f"messages[{n}]", SegmentKind.MESSAGE, f"text {n}" * 9) for n in range(20)]

    first = [corpus.unit_of(segment) for segment in shared]
    again = [corpus.unit_of(segment) for segment in shared]
    copies = [corpus.unit_of(Segment(s.path, s.kind, s.text)) for s in shared]

    assert first == again == copies == list(range(20))
