"""An answer that another engine goes on with has the bits of the undisturbed one, at every token."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from ramify.engine.llm import LLM
from ramify.outputs import RequestOutput, TokenLogprob
from ramify.params import FreeText, SamplingParams, StructuredOutput

PROMPT = "The old bridge over the river was built in"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "n": {"type": "integer"}},
    "required": ["name", "n"],
    "additionalProperties": False,
}
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 7}
CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": SAMPLED | {"top_k": 40, "top_p": 0.95},
    "penalties": SAMPLED
    | {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    "min_tokens": {"min_tokens": 12, "stop": ("the", "of", "e")},
    "schema": SAMPLED | {"structured": StructuredOutput(json_schema=SCHEMA)},
    "calls": SAMPLED
    | {
        "structured": StructuredOutput(
            json_schema=SCHEMA, free_text=FreeText(triggers=(("{",),), resumes=True)
        )
    },
    "banned": SAMPLED | {"banned_sequences": [[5, 6], [7], [300, 301, 302]]},
    "n=2": SAMPLED | {"n": 2},
    "n=2, schema": SAMPLED | {"n": 2, "structured": StructuredOutput(json_schema=SCHEMA)},
}


@dataclass
class Received:
    """What the reader of a request got."""

    token_ids: dict[int, list[int]] = field(default_factory=dict)
    texts: dict[int, list[str]] = field(default_factory=dict)  # with each token
    logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)
    output: RequestOutput | None = None


def receive(llm: LLM, params: SamplingParams, generated: Sequence[Sequence[int]] = ()) -> Received:
    """Run one request to its end."""
    received = Received()
    assert llm.engine.tokenizer is not None
    ids = llm.engine.tokenizer.encode(PROMPT)
    llm.core.add_request(ids, params, generated=generated)
    while llm.core.has_unfinished:
        for event in llm.core.step():
            received.token_ids.setdefault(event.index, []).extend(event.new_token_ids)
            received.logprobs.setdefault(event.index, []).extend(event.logprobs)
            padding = [""] * (len(event.new_token_ids) - 1)
            received.texts.setdefault(event.index, []).extend([event.text, *padding])
            received.output = event.output or received.output
    return received


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    with LLM(kv_cache_tokens=4096, page_size=4) as llm:
        yield llm


@pytest.fixture(scope="module")
def drafting() -> Iterator[LLM]:
    with LLM(kv_cache_tokens=4096, page_size=8, speculative="auto") as llm:
        yield llm


def assert_resumes_everywhere(whole_llm: LLM, rest_llm: LLM, params: SamplingParams) -> None:
    """Cut before each token: tokens, texts and log probabilities behind it have equal bits."""
    whole = receive(whole_llm, params)
    assert whole.output is not None
    longest = max(map(len, whole.token_ids.values()))
    assert longest > 2
    for cut in range(1, longest + 1):
        delivered = [whole.token_ids[index][:cut] for index in range(params.n)]
        if cut % 2:
            rest_llm.cache.clear()  # a prompt that is cached and one that is not

        rest = receive(rest_llm, params, delivered)

        assert rest.output is not None
        for index, tokens in enumerate(delivered):
            assert tokens + rest.token_ids.get(index, []) == whole.token_ids[index]
            before = "".join(whole.texts[index][: len(tokens)])
            ours = before + "".join(rest.texts.get(index, []))
            assert ours == "".join(whole.texts[index])
            assert rest.logprobs.get(index, []) == whole.logprobs[index][len(tokens) :]
        for mine, theirs in zip(rest.output.completions, whole.output.completions, strict=True):
            assert (mine.text, mine.finish_reason) == (theirs.text, theirs.finish_reason)


@pytest.mark.parametrize("name", CASES)
def test_the_rest_has_the_bits_of_the_whole(plain: LLM, name: str) -> None:
    """Greedy, sampled, penalties, grammars, stop strings, several answers."""
    params = SamplingParams(max_tokens=24, logprobs=1, ignore_eos=True, **CASES[name])

    assert_resumes_everywhere(plain, plain, params)


@pytest.mark.parametrize("name", ["greedy", "sampled", "schema", "n=2"])
def test_drafts_change_nothing(plain: LLM, drafting: LLM, name: str) -> None:
    """An engine with speculation goes on with the answer of an engine without it."""
    params = SamplingParams(max_tokens=24, logprobs=1, ignore_eos=True, **CASES[name])

    assert_resumes_everywhere(plain, drafting, params)


def test_a_stop_string_across_the_cut(plain: LLM) -> None:
    """Wherever a stop string is cut, it ends the answer, and none of its text is delivered."""
    assert plain.engine.tokenizer is not None
    text = receive(plain, SamplingParams(max_tokens=24)).output
    assert text is not None
    for begin in (3, 9, 14):
        stop = text.text[begin : begin + 9]

        assert_resumes_everywhere(
            plain, plain, SamplingParams(max_tokens=24, logprobs=0, stop=("never", stop))
        )
