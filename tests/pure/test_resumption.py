"""A request may come with tokens that another engine has delivered; the rest is what would have come."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from ramify.engine.async_llm import AsyncLLM
from ramify.engine.core import EngineCore
from ramify.errors import InvalidParamsError, RequestError, TokenOutOfRangeError
from ramify.outputs import FinishReason, RequestOutput, TokenLogprob
from ramify.params import SamplingParams
from tests.pure.async_bench import run
from tests.pure.engine_bench import Bench, expected

PROMPT = list(range(3, 14))
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"max_tokens": 12, "ignore_eos": True},
    "sampled": {"max_tokens": 12, "temperature": 0.8, "seed": 5, "ignore_eos": True},
    "logprobs": {"max_tokens": 9, "logprobs": 2, "ignore_eos": True},
    "two answers": {"max_tokens": 9, "n": 2, "temperature": 1.0, "seed": 3, "ignore_eos": True},
    "ends of two lengths": {"max_tokens": 40, "n": 3, "temperature": 1.0, "seed": 11},
    "min tokens": {"max_tokens": 12, "min_tokens": 6, "stop": ("A",), "ignore_eos": True},
    "prompt logprobs": {"max_tokens": 6, "prompt_logprobs": 1, "ignore_eos": True},
}


@dataclass
class Received:
    """What the reader of a request got: by answer, and at the end."""

    token_ids: dict[int, list[int]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)
    ends: dict[int, FinishReason] = field(default_factory=dict)
    # By answer: the text that had come with the first k tokens.
    texts_at: dict[int, list[str]] = field(default_factory=dict)
    output: RequestOutput | None = None


def receive(
    core: EngineCore,
    params: SamplingParams,
    generated: Sequence[Sequence[int]] = (),
    prompt: Sequence[int] = PROMPT,
) -> Received:
    """Run one request to its end."""
    received = Received()
    request_id = core.add_request(prompt, params, generated=generated)
    while core.has_unfinished:
        for event in core.step():
            assert event.request_id == request_id
            assert received.output is None, "an increment after the last"
            index = event.index
            received.token_ids.setdefault(index, []).extend(event.new_token_ids)
            received.texts[index] = received.texts.get(index, "") + event.text
            received.logprobs.setdefault(index, []).extend(event.logprobs)
            received.texts_at.setdefault(index, [""]).extend(
                [received.texts[index]] * len(event.new_token_ids)
            )
            if event.finish_reason is not None:
                assert index not in received.ends, "an answer ends once"
                received.ends[index] = event.finish_reason
            received.output = event.output or received.output
        core.cache.check()
    assert received.output is not None
    assert not core.live
    return received


def assert_resumes_everywhere(params: SamplingParams, **options: Any) -> None:
    """Cut an answer before each of its tokens; what comes then is the rest, and the whole is equal."""
    # Without drafts a step has one token: the text that came with it is known.
    whole = receive(Bench(**{**options, "speculative": "off"}).core, params)
    assert whole.output is not None
    longest = max(map(len, whole.token_ids.values()))
    for cut in range(1, longest + (params.prompt_logprobs is None)):
        delivered = [whole.token_ids[index][:cut] for index in range(params.n)]

        rest = receive(Bench(**options).core, params, delivered)

        assert rest.output is not None
        for index, tokens in enumerate(delivered):
            assert tokens + rest.token_ids.get(index, []) == whole.token_ids[index]
            before = whole.texts_at[index][len(tokens)]
            assert before + rest.texts.get(index, "") == whole.texts[index]
            if params.logprobs is not None:
                ours = rest.logprobs.get(index, [])
                assert ours == whole.logprobs[index][len(tokens) :]
        assert rest.ends == whole.ends
        for mine, theirs in zip(rest.output.completions, whole.output.completions, strict=True):
            assert (mine.token_ids, mine.text) == (theirs.token_ids, theirs.text)
            assert (mine.finish_reason, mine.stop_reason) == (
                theirs.finish_reason,
                theirs.stop_reason,
            )
        assert rest.output.usage == whole.output.usage
        assert rest.output.prompt_logprobs == whole.output.prompt_logprobs


@pytest.mark.parametrize("name", CASES)
def test_an_answer_resumes_at_every_token(name: str) -> None:
    """Tokens, texts, log probabilities, ends and usage are those of the undisturbed answer."""
    assert_resumes_everywhere(SamplingParams(**CASES[name]))


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_pages_do_not_matter(page_size: int) -> None:
    """A cut inside a page and one at its border are the same."""
    assert_resumes_everywhere(SamplingParams(**CASES["greedy"]), page_size=page_size)


def test_a_stop_string_across_the_cut_ends_the_answer() -> None:
    """The text before the cut and that after it are one text, in which stop strings are found."""
    tokens = expected(PROMPT, 12, ends=())
    letters = "".join(chr(ord("A") + token) for token in tokens)
    for begin in range(3, 9):
        for length in (1, 2, 4):
            stop = letters[begin : begin + length]
            params = SamplingParams(max_tokens=12, stop=stop, ignore_eos=True)

            assert_resumes_everywhere(params)
            assert_resumes_everywhere(
                SamplingParams(max_tokens=12, stop=stop, include_stop=True, ignore_eos=True)
            )


@pytest.mark.parametrize("speculative", ["ngram", "tree"])
def test_drafts_do_not_matter(speculative: str) -> None:
    """With speculation the same tokens come, wherever the drafts end."""
    cycle = [5, 6, 7, 8, 9]

    def next_token(context: Sequence[int]) -> int:
        return cycle[len(context) % 5] if len(context) % 11 else 30

    assert_resumes_everywhere(
        SamplingParams(max_tokens=30, ignore_eos=True),
        speculative=speculative,
        next_token=next_token,
    )


def test_failed_steps_and_preemption_keep_what_was_delivered() -> None:
    """Recovery recomputes a resumed request as any other, and delivers nothing twice."""
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    whole = receive(Bench().core, params)
    delivered = [whole.token_ids[0][:5]]

    for step in range(6):
        rest = receive(Bench(fail_at={step}).core, params, delivered)

        assert delivered[0] + rest.token_ids[0] == whole.token_ids[0]
    bench = Bench(pool_tokens=36)
    other = bench.core.add_request(PROMPT[::-1], SamplingParams(max_tokens=20, ignore_eos=True))
    ours = bench.core.add_request(PROMPT, params, generated=delivered)
    tokens: dict[int, list[int]] = {other: [], ours: []}
    while bench.core.has_unfinished:
        for event in bench.core.step():
            tokens[event.request_id] += event.new_token_ids
    assert bench.core.scheduler.num_preemptions > 0
    assert delivered[0] + tokens[ours] == whole.token_ids[0]


def test_a_request_whose_answer_is_complete_ends_without_a_forward_pass() -> None:
    """Where every token was delivered, the end comes at once, with the whole answer."""
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    whole = receive(Bench().core, params)
    bench = Bench()

    rest = receive(bench.core, params, [whole.token_ids[0]])

    assert bench.device.num_steps == 0
    assert rest.token_ids == {0: []}
    assert rest.output is not None
    assert rest.output.token_ids == tuple(whole.token_ids[0])
    assert rest.ends == {0: FinishReason.LENGTH}


def test_the_report_tells_recomputed_tokens_from_the_prompt() -> None:
    """Prompt tokens are counted as prompt, delivered tokens as recomputed, each once."""
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    whole = receive(Bench().core, params)
    bench = Bench()

    cold = receive(bench.core, params, [whole.token_ids[0][:6]]).output
    warm = receive(bench.core, params, [whole.token_ids[0][:6]]).output

    assert cold is not None
    assert warm is not None
    assert cold.cache.prompt_tokens == warm.cache.prompt_tokens == len(PROMPT)
    assert (cold.cache.computed_tokens, cold.cache.recomputed_tokens) == (len(PROMPT), 6)
    assert (warm.cache.read_tokens, warm.cache.computed_tokens) == (len(PROMPT), 0)
    assert warm.cache.recomputed_tokens == 1  # pages of 4 hold 16 of its 17 tokens
    assert cold.usage.completion_tokens == 12


def test_an_answer_that_had_not_begun_begins() -> None:
    """Where one answer has tokens and another none, both come whole."""
    params = SamplingParams(max_tokens=5, n=2, temperature=1.0, seed=3, ignore_eos=True)
    whole = receive(Bench().core, params)

    rest = receive(Bench().core, params, [whole.token_ids[0][:2]])

    assert rest.token_ids == {0: whole.token_ids[0][2:], 1: whole.token_ids[1]}


@pytest.mark.parametrize(
    ("generated", "error", "message"),
    [
        ([[1], [2]], InvalidParamsError, "each of n=1 answers"),
        ([[1] * 13], InvalidParamsError, "at most 12 tokens"),
        ([[1, 99]], TokenOutOfRangeError, "99"),
        ([[1, True]], InvalidParamsError, "an integer token id"),
        ("12", InvalidParamsError, "each of n=1 answers"),
        ([[1, 0, 2]], InvalidParamsError, "2 tokens: the last of these ends the answer"),
    ],
    ids=str,
)
def test_what_no_engine_delivered_is_refused(
    generated: Any, error: type[RequestError], message: str
) -> None:
    """Tokens that cannot be the beginning of this answer are an error, and leave nothing queued."""
    core = Bench().core

    with pytest.raises(error, match=message):
        core.add_request(PROMPT, SamplingParams(max_tokens=12), generated=generated)

    assert not core.has_unfinished
    assert not core.live


def test_a_whole_answer_with_prompt_logprobs_is_refused() -> None:
    """They need the prompt computed, which nothing would do."""
    params = SamplingParams(max_tokens=2, prompt_logprobs=0)

    with pytest.raises(InvalidParamsError, match="the prompt must be computed"):
        Bench().core.add_request(PROMPT, params, generated=[[4, 4]])


def test_a_later_answer_alone_is_refused() -> None:
    """All answers begin in one step: tokens of the second alone were never delivered."""
    with pytest.raises(InvalidParamsError, match="tokens of the first answer too"):
        Bench().core.add_request(PROMPT, SamplingParams(n=2), generated=[[], [4]])


def test_a_stream_resumes() -> None:
    """`AsyncLLM.stream` passes the tokens on."""
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    tokens = expected(PROMPT, 8, ends=())

    async def rest() -> list[int]:
        async with AsyncLLM.from_core(Bench().core) as llm:
            stream = llm.stream(PROMPT, params, generated=[tokens[:3]])
            return [token async for event in stream for token in event.new_token_ids]

    assert run(rest()) == tokens[3:]
