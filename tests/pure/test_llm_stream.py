"""`LLM.stream`, `close`, `with`, and prompts that are refused, over a fake device."""

import gc
import logging
from typing import Any

import pytest

from ramify.engine.llm import LLM
from ramify.errors import (
    ConfigError,
    EmptyPromptError,
    EngineStoppedError,
    RequestError,
    UnknownRequestError,
)
from ramify.outputs import FinishReason
from ramify.params import SamplingParams
from tests.pure.engine_bench import Bench, expected
from tests.pure.test_interrupts import Interrupt

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
REFUSED: list[list[int]] = [[], [10**6], [5] * 10_000]


def made(**options: Any) -> tuple[LLM, Bench]:
    bench = Bench(**options)
    return LLM.from_core(bench.core), bench


def sampling(max_tokens: int, **others: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **others)


def test_a_stream_yields_the_answer_step_by_step() -> None:
    """One increment a step; the last one has the whole output."""
    llm, bench = made()

    events = list(llm.stream(PROMPT, sampling(5)))

    tokens = [token for event in events for token in event.new_token_ids]
    assert tokens == expected(PROMPT, 5, ends=())
    assert [event.output is not None for event in events] == [False] * 4 + [True]
    assert events[-1].output is not None
    assert list(events[-1].output.token_ids) == tokens
    assert not bench.core.live


def test_two_streams_and_a_batch_advance_together() -> None:
    """Increments of one call wait for its reader while another call steps."""
    llm, bench = made()
    first, second = llm.stream(PROMPT, sampling(4)), llm.stream(PROMPT[1:], sampling(6))

    tokens = [*next(first).new_token_ids]
    others = [*next(second).new_token_ids]
    [whole] = llm.generate(PROMPT[2:], sampling(3))
    tokens += [token for event in first for token in event.new_token_ids]
    others += [token for event in second for token in event.new_token_ids]

    assert tokens == expected(PROMPT, 4, ends=())
    assert others == expected(PROMPT[1:], 6, ends=())
    assert list(whole.token_ids) == expected(PROMPT[2:], 3, ends=())
    assert not bench.core.live


def test_a_stream_of_several_answers_names_each() -> None:
    """`index` is that of the answer; the output comes once, with all answers."""
    llm, _ = made()

    events = list(llm.stream(PROMPT, sampling(3, n=2, temperature=1.0, seed=1)))

    assert {event.index for event in events} == {0, 1}
    [output] = [event.output for event in events if event.output is not None]
    for index, completion in enumerate(output.completions):
        tokens = [t for event in events if event.index == index for t in event.new_token_ids]
        assert tuple(tokens) == completion.token_ids


@pytest.mark.parametrize("next_call", ["step", "generate", "stream"])
def test_a_stream_that_is_left_is_aborted_before_the_next_step(next_call: str) -> None:
    """Its request computes nothing more, and holds no pages."""
    llm, bench = made()
    for _ in llm.stream(PROMPT, sampling(50)):
        break
    gc.collect()
    num_steps = llm.stats().num_steps

    if next_call == "step":
        assert llm.has_unfinished()
        assert llm.step() == []
    elif next_call == "generate":
        llm.generate(PROMPT[1:], sampling(1))
    else:
        list(llm.stream(PROMPT[1:], sampling(1)))

    assert not bench.core.live
    assert not llm.has_unfinished()
    assert llm.stats().num_steps <= num_steps + 1
    bench.core.cache.check()


def test_a_stream_that_is_never_read_asks_for_nothing() -> None:
    """The request is queued with the first increment."""
    llm, bench = made()

    llm.stream(PROMPT, sampling(5))

    assert not bench.core.live


@pytest.mark.parametrize("prompt", REFUSED)
def test_a_stream_of_a_bad_prompt_raises(prompt: list[int]) -> None:
    """Before the first increment."""
    llm, bench = made()

    with pytest.raises(RequestError):
        next(iter(llm.stream(prompt, sampling(5))))

    assert not bench.core.live


def test_an_aborted_stream_ends() -> None:
    """`abort` of its request gives the last increment."""
    llm, _ = made()
    stream = llm.stream(PROMPT, sampling(50))

    llm.abort(next(iter(stream)).request_id)
    [last] = list(stream)

    assert last.output is not None
    assert last.finish_reason is last.output.finish_reason is FinishReason.ABORT


def test_a_stream_whose_output_was_taken_ends() -> None:
    """It does not step for ever, waiting for an output that another call has returned."""
    llm, _ = made()
    stream = llm.stream(PROMPT, sampling(5))
    request_id = next(stream).request_id
    while llm.has_unfinished():
        llm.step()
    llm.take_output(request_id)

    with pytest.raises(UnknownRequestError):
        next(stream)

    assert list(stream) == []


def test_an_interrupted_stream_leaves_no_request() -> None:
    """Wherever Ctrl-C comes, before its id is known too: the next step computes nothing of it."""
    at = 1
    gc.collect()
    gc.freeze()  # what other tests of the process hold, which each collection would go through
    while True:
        llm, bench = made()
        interrupt = Interrupt(at, ("call", "return"))
        if not interrupt.during(lambda llm=llm: list(llm.stream(PROMPT, sampling(3)))):  # type: ignore[misc]
            break
        gc.collect()
        llm.step()
        assert not bench.core.live, at
        at += 23
    assert at > 100


@pytest.mark.parametrize("prompt", REFUSED)
def test_a_bad_prompt_is_answered_alike_alone_and_in_a_list(
    prompt: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """An output with the error, and one warning for the call."""
    llm, _ = made()

    with caplog.at_level(logging.WARNING, "ramify.engine.offline"):
        [in_list] = llm.generate([prompt], sampling(2))
        listed, good = llm.generate([prompt, PROMPT], sampling(2))
        both = llm.generate([prompt, prompt], sampling(2))

    assert good.error is None
    for output in (in_list, listed, *both):
        assert isinstance(output.error, RequestError)
        assert str(output.error) == str(in_list.error)
        assert output.finish_reason is FinishReason.ERROR
        assert output.was_refused
        assert output.text == ""
    warnings = [record.getMessage() for record in caplog.records]
    assert [warning.partition(" prompts")[0] for warning in warnings] == [
        "1 of 1",
        "1 of 2",
        "2 of 2",
    ]
    assert str(in_list.error) in warnings[0]


def test_a_bad_prompt_alone_is_an_output() -> None:
    """A single prompt, which is no list of prompts, gets what it gets in a list."""
    llm, _ = made()
    calls: list[Any] = []

    [empty] = llm.generate("", sampling(2), on_finished=calls.append)
    [too_large] = llm.generate([10**6], sampling(2))

    assert isinstance(empty.error, EmptyPromptError)
    assert calls == [empty]
    assert isinstance(too_large.error, RequestError)


def test_an_output_has_the_names_of_vllm() -> None:
    """`output.outputs[0].text` is the first completion's text."""
    llm, _ = made()

    [output] = llm.generate(PROMPT, sampling(2, n=2))

    assert output.outputs == output.completions
    assert output.outputs[0].text == output.text
    assert output.outputs[1].token_ids == output.completions[1].token_ids


def test_a_closed_llm_has_ended_its_requests_and_says_so() -> None:
    """Live requests are aborted; later calls raise EngineStoppedError; closing twice is allowed."""
    llm, bench = made()
    llm.add_request(PROMPT, sampling(50))
    llm.step()

    llm.close()
    llm.close()

    assert not bench.core.live
    assert bench.core.cache.stats().num_leases == 0
    for call in (
        lambda: llm.generate(PROMPT),
        lambda: llm.add_request(PROMPT),
        lambda: llm.stream(PROMPT),
        llm.step,
        llm.has_unfinished,
        llm.stats,
        lambda: llm.cache,
        lambda: llm.core,
        lambda: llm.engine,
    ):
        with pytest.raises(EngineStoppedError, match="was closed; make another one"):
            call()


def test_a_stream_that_begins_after_the_end_says_so() -> None:
    """Though it was made before, when nothing was queued."""
    llm, bench = made()
    stream = llm.stream(PROMPT, sampling(5))
    llm.close()

    with pytest.raises(EngineStoppedError, match="was closed; make another one"):
        next(stream)

    assert not bench.core.live


def test_a_block_closes_the_llm_at_its_end() -> None:
    """Also when it ends by an error."""
    llm, bench = made()
    stream = llm.stream(PROMPT, sampling(50))

    def use() -> None:
        with llm as entered:
            assert entered is llm
            next(stream)
            raise KeyError

    with pytest.raises(KeyError):
        use()

    assert not bench.core.live
    [last] = list(stream)
    assert last.finish_reason is FinishReason.ABORT
    with pytest.raises(EngineStoppedError):
        llm.generate(PROMPT)


def test_the_weights_of_a_closed_llm_are_freed() -> None:
    """Nothing of the `LLM` refers to the core any more."""
    llm, bench = made()
    llm.generate(PROMPT, sampling(2))

    llm.close()

    assert not any(bench.core is value for value in vars(llm).values())
    assert llm._engine is None


def test_a_model_without_tokenizer_says_so() -> None:
    """`get_tokenizer` returns the tokenizer, and raises where there is none."""
    llm, _ = made()

    with pytest.raises(ConfigError, match="give prompts as token ids"):
        llm.get_tokenizer()
