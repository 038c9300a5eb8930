"""Whatever a model writes, parsing neither fails nor loses text, and cuts change nothing."""

from __future__ import annotations

import json
import random
import re
from functools import partial
from itertools import pairwise

import pytest

from ramify.server.model_dialects.events import (
    ArgumentsDelta,
    CallEnd,
    CallStart,
    OutputEvent,
    ReasoningDelta,
    TextDelta,
)
from tests.pure.drawn_answers import FRAGMENTS
from tests.pure.model_answers import FAMILIES, SCHEMAS, Call, Family, ModelAnswer

NUM_MUTATIONS = 10_000
# No delimiter contains these letters: each must come out, in its place.
LETTERS = "ΑΒΓΔΘΛΞΠΣΦΨΩ"
MARKS = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|channel|>",
    "<|message|>", "<|start|>assistant", "```json\n", "```", "<function=add>", "<parameter=path>",
    "</parameter>", "</function>", "<arg_key>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "｜DSML｜",
    '{"name": "add", "arguments": {', '"', "}", "\\", "\\ud83d", "\\u12", "null", "[", "add(", "=",
)  # fmt: skip


def sentence(rng: random.Random) -> str:
    """Words of `LETTERS`, with fragments between them."""
    return "".join(
        rng.choice(LETTERS) if rng.random() < 0.6 else rng.choice(FRAGMENTS)
        for _ in range(rng.randrange(8))
    )


def answer_of(rng: random.Random, family: Family) -> ModelAnswer:
    """An answer with words of `LETTERS` in every part."""
    calls = [
        Call(
            rng.choice(family.names),
            {
                "path": sentence(rng),
                "count": rng.randrange(99),
                "options": {"a": [sentence(rng)], "b": rng.choice([None, True, 1.5])},
            },
        )
        for _ in range(rng.randrange(3))
    ]
    dumps = partial(json.dumps, ensure_ascii=False, indent=rng.choice([None, 1]))
    return ModelAnswer(sentence(rng), sentence(rng), calls, dumps)


def mutated(rng: random.Random, text: str) -> str:
    """A text with a few spans deleted, doubled, moved, or put in."""
    for _ in range(rng.randrange(1, 4)):
        start = rng.randrange(len(text) + 1)
        end = min(len(text), start + rng.randrange(1, 30))
        match rng.randrange(5):
            case 0:
                text = text[:start] + text[end:]
            case 1:
                text = text[:end] + text[start:]
            case 2:
                text = text[:start] + rng.choice(MARKS) + text[start:]
            case 3:
                text = text[:start] + rng.choice((*FRAGMENTS, *LETTERS)) + text[start:]
            case _:
                text = text[:end]
    return text


def parsed(family: Family, answer: str, places: list[int]) -> list[tuple[str, str]]:
    """Events with neighbouring deltas joined, each as (kind, text), of pieces that end at `places`."""
    parser = family.form.new_parser(family.names, prompt_end=family.prompt_end, schemas=SCHEMAS)
    events: list[OutputEvent] = []
    for start, end in pairwise([0, *places, len(answer)]):
        events += parser.feed(answer[start:end])
    events += parser.feed("", is_last=True)
    parts: list[tuple[str, str]] = []
    is_open = False
    for event in events:
        kind = type(event).__name__
        match event:
            case CallStart(name, _):
                assert not is_open
                is_open = True
                parts.append((kind, name))
            case CallEnd(is_complete):
                assert is_open
                is_open = False
                parts.append((kind, str(is_complete)))
            case TextDelta(text) | ReasoningDelta(text) | ArgumentsDelta(text):
                assert is_open == (kind == "ArgumentsDelta")
                before = parts.pop()[1] if parts and parts[-1][0] == kind else ""
                parts.append((kind, before + text))
    assert not is_open
    return parts


def is_subsequence(text: str, of: str) -> bool:
    """Whether all characters of `text` stand in `of`, in their order."""
    characters = iter(of)
    return all(character in characters for character in text)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_mutated_answer_loses_no_text(family: Family) -> None:
    """Each letter comes out once and in order; text and reasoning have nothing that was not written.

    What is dropped are delimiters, white space next to them, ids, and special tokens out of place.
    """
    rng = random.Random(family.name)
    special_tokens = re.compile("|".join(map(re.escape, family.form.kept_special_tokens)) or "(?!)")
    for _ in range(NUM_MUTATIONS // len(FAMILIES) + 1):
        text = mutated(rng, family.write(answer_of(rng, family)))
        places = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(12)))

        whole = parsed(family, text, [])

        assert parsed(family, text, places) == whole, text
        letters = [
            letter
            for kind, content in whole
            if kind not in ("CallStart", "CallEnd")
            for letter in content
            if letter in LETTERS
        ]
        assert letters == [letter for letter in text if letter in LETTERS], (text, whole)
        shown = "".join(
            content for kind, content in whole if kind in ("TextDelta", "ReasoningDelta")
        )
        assert is_subsequence(shown, special_tokens.sub("", text)), (text, whole)
