"""`LLM` over a fake device: options, events, statistics, interrupts and the progress bar."""

from collections.abc import Sequence
from typing import Any

import pytest

from ramify.engine.llm import LLM
from ramify.engine.offline import progress_bar
from ramify.errors import (
    ConfigError,
    InvalidParamsError,
    OutOfPagesError,
    UnknownRequestError,
)
from ramify.outputs import FinishReason, RequestOutput
from ramify.params import SamplingParams
from tests.pure.engine_bench import Bench, expected

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def made(**options: Any) -> tuple[LLM, Bench]:
    bench = Bench(**options)
    return LLM.from_core(bench.core), bench


def sampling(max_tokens: int, **others: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **others)


def test_options_are_for_all_prompts_or_for_each() -> None:
    """An option is one value or a list with a value per prompt; tenants share no cache."""
    llm, _ = made()

    llm.generate([PROMPT] * 2, sampling(1), tenant="a")
    outputs = llm.generate(
        [PROMPT] * 4, sampling(1), tenant=["a", "a", "b", ""], salt=["", "x", "", ""]
    )

    assert [output.cache.read_tokens for output in outputs] == [7, 0, 0, 0]
    assert llm.generate(PROMPT, sampling(1), priority=3)[0].cache.read_tokens == 7
    with pytest.raises(InvalidParamsError, match="2 values"):
        llm.generate([PROMPT] * 3, tenant=["a", "b"])
    [refused] = llm.generate(PROMPT, priority="x")  # type: ignore[arg-type]
    assert isinstance(refused.error, InvalidParamsError)
    assert refused.error.name == "priority"
    with pytest.raises(InvalidParamsError, match="tenant"):
        llm.add_request(PROMPT, tenant=3)  # type: ignore[arg-type]


def test_an_event_is_a_triple_and_knows_which_answer_it_is_of() -> None:
    """An event unpacks into three values, and `index` names its completion when n > 1."""
    llm, _ = made()
    request = llm.add_request(PROMPT, sampling(5, n=2, temperature=1.0, seed=3))
    streamed: dict[int, list[int]] = {0: [], 1: []}
    ends = []

    while llm.has_unfinished():
        for event in llm.step():
            key, tokens, finished = event
            assert key == request
            streamed[event.index] += tokens
            ends.append(finished)

    output = llm.take_output(request)
    assert [list(completion.token_ids) for completion in output.completions] == [
        streamed[0],
        streamed[1],
    ]
    assert ends.count(True) == 1
    assert ends[-1]


@pytest.mark.parametrize("at", range(6))
def test_an_interrupt_ends_the_call_and_nothing_else(at: int) -> None:
    """Ctrl-C aborts the requests of its `generate` call; requests added before it finish."""
    llm, bench = made(fail_at={at}, error=KeyboardInterrupt(), max_num_seqs=3)
    mine = llm.add_request(PROMPT, sampling(9))

    with pytest.raises(KeyboardInterrupt):
        llm.generate([PROMPT[::-1], PROMPT[2:], PROMPT[3:]], sampling(3))
    streamed: list[int] = []
    while llm.has_unfinished():
        for key, tokens, _ in llm.step():
            assert key == mine
            streamed += tokens

    assert streamed == list(llm.take_output(mine).token_ids) == expected(PROMPT, 9, ends=())
    assert list(llm.generate(PROMPT[2:], sampling(3))[0].token_ids) == expected(
        PROMPT[2:], 3, ends=()
    )
    assert not bench.core.live
    llm.cache.clear()
    assert llm.cache.stats().free_pages == llm.cache.core.num_pages
    with pytest.raises(UnknownRequestError):
        llm.take_output(mine)


def test_an_interrupt_between_two_tellings_is_forgotten() -> None:
    """After an interrupt in `on_finished`, no request and no event of that call remains."""

    def on_finished(output: RequestOutput) -> None:
        raise KeyboardInterrupt

    llm, _ = made()
    with pytest.raises(KeyboardInterrupt):
        llm.generate([PROMPT, PROMPT[1:]], [sampling(1), sampling(50)], on_finished=on_finished)

    assert not llm.has_unfinished()
    assert llm.step() == []


def test_what_is_called_when_an_answer_is_there_may_ask_more() -> None:
    """`on_finished` may call `generate`, also while other requests of the outer call finish."""
    llm, bench = made(max_num_seqs=4)
    later: list[tuple[int, ...]] = []

    def on_finished(output: RequestOutput) -> None:
        later.append(llm.generate([[*output.prompt_token_ids, 7]], sampling(20))[0].token_ids)

    prompts, lengths = [[*PROMPT, k] for k in range(4)], [2, 10, 11, 30]
    outputs = llm.generate(
        prompts, [sampling(length) for length in lengths], on_finished=on_finished
    )

    for prompt, length, output in zip(prompts, lengths, outputs, strict=True):
        assert list(output.token_ids) == expected(prompt, length, ends=())
    assert sorted(later) == sorted(tuple(expected([*prompt, 7], 20, ends=())) for prompt in prompts)
    assert not llm.has_unfinished()
    assert not bench.core.live


def test_an_answer_that_pins_leave_no_room_for_fails_alone() -> None:
    """A request that cannot fit beside pinned pages fails; the rest of its call is answered."""
    llm, bench = made(pool_tokens=64, page_size=4)
    llm.generate([[5] * 33], sampling(1))
    pin = llm.cache.pin([5] * 33)

    outputs = llm.generate([PROMPT, [7] * 40, PROMPT[1:]], sampling(4))

    assert [type(output.error) for output in outputs] == [type(None), OutOfPagesError, type(None)]
    assert outputs[1].finish_reason is FinishReason.ERROR
    for prompt, output in ((PROMPT, outputs[0]), (PROMPT[1:], outputs[2])):
        assert list(output.token_ids) == expected(prompt, 4, ends=())
    llm.cache.unpin(pin)
    assert llm.generate([[7] * 40], sampling(4))[0].error is None
    assert not bench.core.live


def test_statistics_count_requests_and_work() -> None:
    """Statistics report current values and totals since the start."""
    llm, _ = made(max_num_seqs=1)
    for _ in range(3):
        llm.add_request(PROMPT, sampling(2))
    llm.step()

    now = llm.stats()
    while llm.has_unfinished():
        llm.step()
    later = llm.stats()

    assert (now.num_running, now.num_waiting, now.num_steps) == (1, 2, 1)
    assert (later.num_running, later.num_waiting, later.num_preemptions) == (0, 0, 0)
    assert later.num_computed_tokens == 8 + 1 + 1 + 3  # all but the last token is read
    assert later.cache == llm.cache.stats()
    assert llm.run(lambda core: core.num_steps) == later.num_steps


def test_an_engine_without_a_model_says_so() -> None:
    """Calls that need a model raise ConfigError, not AttributeError."""
    llm, _ = made()

    with pytest.raises(ConfigError, match="without a model"):
        llm.reload_weights("ramify-tiny")
    with pytest.raises(ConfigError, match="without a model"):
        print(llm.engine)  # noqa: T201


@pytest.mark.parametrize(
    ("prompts", "progress", "shown"),
    [
        ([PROMPT] * 3, True, True),
        ([PROMPT] * 3, None, False),  # stderr is no terminal here
        ([PROMPT] * 3, False, False),
        ([PROMPT], True, True),
    ],
)
def test_a_bar_is_shown_on_a_terminal_or_when_asked(
    prompts: Sequence[Sequence[int]],
    progress: bool | None,
    shown: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The bar writes the number of answers and tokens to stderr, and nothing to stdout."""
    llm, _ = made()

    llm.generate(prompts, sampling(4), progress=progress)

    captured = capsys.readouterr()
    assert captured.out == ""
    assert (f"{len(prompts)}/{len(prompts)}" in captured.err) == shown
    assert bool(captured.err) == shown
    if shown:
        assert f"{4 * len(prompts)} tokens" in captured.err.replace("\n", " ")


def test_the_bar_counts_outputs_that_failed() -> None:
    """A failed output counts; without prompt tokens the bar shows no cached share."""
    llm, _ = made()
    outputs = llm.generate([PROMPT, [-1]], sampling(1), progress=True)

    assert outputs[1].error is not None
    with progress_bar(1, False) as count:
        count(outputs[1])


@pytest.mark.parametrize("where", ["waiting", "scheduler", "answers"])
@pytest.mark.parametrize("is_done", [False, True])
def test_an_interrupt_while_prompts_are_queued_leaves_none_behind(
    where: str, is_done: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C before or after any queue's `add` leaves no request of the interrupted call."""
    llm, bench = made(max_num_seqs=3, check_sample=1.0)
    mine = llm.add_request(PROMPT, sampling(3), tenant="a")
    of: Any = {
        "waiting": bench.core.scheduler.waiting,
        "scheduler": bench.core.scheduler,
        "answers": llm._driver,
    }[where]
    real, calls = of.add, []

    def add(*args: Any, **options: Any) -> Any:
        calls.append(args)
        if len(calls) < 3:
            return real(*args, **options)
        if is_done:
            real(*args, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(of, "add", add)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[7, i] for i in range(6)], sampling(2, n=2), tenant="b")

    assert [request.id for request in bench.core.live] == [mine]
    assert bench.core.scheduler.waiting.num_uncached == len(PROMPT)
    (other,) = llm.generate(PROMPT, sampling(2), tenant="b")
    assert list(other.token_ids) == expected(PROMPT, 2, ends=())
    while llm.has_unfinished():
        llm.step()
    assert list(llm.take_output(mine).token_ids) == expected(PROMPT, 3, ends=())
    assert bench.core.recovery.counts.rebuilds == 0


def test_prompts_that_were_refused_are_told_and_counted_too() -> None:
    """`on_finished` is called once per output, also for a refused prompt."""
    llm, _ = made()
    reported: list[RequestOutput] = []

    outputs = llm.generate([PROMPT, [], [1, 2]], sampling(1), on_finished=reported.append)

    assert len(reported) == 3
    assert {id(output) for output in reported} == {id(output) for output in outputs}
    assert outputs[1].error is not None


def test_what_is_warmed_is_a_list_of_prompts() -> None:
    """`warm` accepts a list of WarmPrompt only, and `unpin` a whole number only."""
    llm, _ = made()

    with pytest.raises(InvalidParamsError, match="a list of WarmPrompt"):
        llm.cache.warm(["a text"])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="whole number"):
        llm.cache.unpin(None)  # type: ignore[arg-type]
