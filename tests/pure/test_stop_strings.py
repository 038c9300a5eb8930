"""Stop strings, biases and banned words in any number: the same answers, at a price that does not grow."""

from __future__ import annotations

import json
import time
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ramify.engine.logits.logits_processors import LogitsProcessor
from ramify.engine.stop_strings import StopStrings
from ramify.params import SamplingParams
from tests.pure.server_bench import ask, chat, tokenizer_with

STRINGS = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=6)
TEXTS = st.text("abc", max_size=12)


def first_by_search(strings: list[str], text: str, num_chars: int) -> tuple[int, str] | None:
    matches = [
        (begin, stop)
        for stop in strings
        if (begin := text.find(stop, max(0, num_chars - len(stop) + 1))) >= 0
    ]
    return min(matches, default=None)


@given(STRINGS, TEXTS, st.integers(0, 12))
def test_the_first_string_is_found(strings: list[str], text: str, num_chars: int) -> None:
    """The one that begins first, of those that end after what was searched before."""
    num_chars = min(num_chars, len(text))

    assert StopStrings(strings).find(text, num_chars) == first_by_search(strings, text, num_chars)


@given(STRINGS, TEXTS, st.integers(0, 12))
def test_text_is_held_where_a_string_may_begin(
    strings: list[str], text: str, num_emitted: int
) -> None:
    """As much of the end as a string begins with; a string that is complete is not held."""
    num_emitted = min(num_emitted, len(text))
    sizes = [
        size
        for size in range(1, len(text) - num_emitted + 1)
        if any(stop[:size] == text[-size:] for stop in strings if len(stop) > size)
    ]

    assert StopStrings(strings).held_len(text, num_emitted) == max(sizes, default=0)


def seconds_per_token(strings: list[str], text: str) -> float:
    """The time for 4 more characters of a text, the mean of all of it."""
    stops, num_emitted, begin_s = StopStrings(strings), 0, time.perf_counter()
    for end in range(4, len(text), 4):
        assert stops.find(text[:end], end - 4) is None
        num_emitted = max(num_emitted, end - stops.held_len(text[:end], num_emitted))
    return (time.perf_counter() - begin_s) / (len(text) // 4)


def test_hundreds_of_strings_cost_little_a_token() -> None:
    """Also long ones, and strings and texts made to match nearly everywhere."""
    words = [f"stop {number} here" for number in range(1000)]
    nearly = ["a" * length + "b" for length in range(2000, 2500)]
    cases = [
        (words, "stop and stop 5 there " * 200),
        (nearly, "a" * 4000),
        (["a" * 4095 + "b"], "ac" * 2000),
    ]

    assert max(seconds_per_token(*case) for case in cases) < 0.001


def test_a_string_of_hundreds_ends_an_answer() -> None:
    """The server takes them, and names the one that it found."""
    strings = [f"stop{number}" for number in range(500)] + ["x" * 2000, "quick brown"]
    body = chat("x", stop=strings, max_tokens=40, logprobs=True)

    answer = ask("/v1/chat/completions", body, next_text="The quick brown fox")

    [choice] = answer.json["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("The ", "stop")


def test_every_token_of_a_vocabulary_may_have_a_bias() -> None:
    """And be allowed; many words may be banned; the server takes each."""
    vocab = tokenizer_with(None).vocab_size
    fields: list[dict[str, Any]] = [
        {"logit_bias": {str(token): -1 for token in range(vocab)}},
        {"allowed_token_ids": list(range(vocab))},
        {"stop_token_ids": list(range(vocab - 1))},
        {"bad_words": [f"word{number}" for number in range(3000)]},
    ]

    for options in fields:
        answer = ask("/v1/chat/completions", chat("x", **options))

        assert answer.status == 200, answer.body


def test_a_bias_as_large_as_the_largest_vocabulary_is_decoded() -> None:
    """The error is about the model's vocabulary, not about the size of the body."""
    bias = {str(token): -100 for token in range(262_144)}

    answer = ask("/v1/chat/completions", json.dumps(chat("x", logit_bias=bias)).encode())

    assert answer.json["error"]["param"] == "logit_bias"
    assert "token ids in 0.." in answer.json["error"]["message"]


def test_many_bans_and_biases_cost_little_a_step() -> None:
    """Of a vocabulary of 150,000: a bias for each, 10,000 banned tokens and 10,000 pairs."""
    vocab = 150_000
    banned = [[token] for token in range(10_000)] + [[1, token] for token in range(20_000, 30_000)]
    params = SamplingParams(
        logit_bias=dict.fromkeys(range(vocab), -1.0),
        allowed_token_ids=list(range(vocab)),
        banned_sequences=banned,
    )
    processor = LogitsProcessor((), params, stop_token_ids=frozenset(), vocab_size=vocab)

    begin_s = time.perf_counter()
    for _ in range(20):
        processor.advance([1])
        processor.for_step([1], ())

    assert (time.perf_counter() - begin_s) / 20 < 0.02
    [mask] = processor.for_step([1], ()).token_bitmasks or ()
    assert mask is not None
    allowed = sum(byte.bit_count() for byte in mask.tolist())
    assert allowed == vocab - 20_000
