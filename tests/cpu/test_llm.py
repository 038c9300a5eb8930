"""`LLM` on tiny checkpoints: accepted inputs, outputs, and no leaks."""

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from ramify import LLM, SamplingParams
from ramify.errors import (
    ChatTemplateError,
    ConfigError,
    InvalidParamsError,
    UnknownRequestError,
)
from ramify.outputs import FinishReason, RequestOutput, TokenLogprob
from ramify.testing import write_tiny_checkpoint
from tests.cpu.engine_cases import assert_idle

DOCUMENT = "the rain in the north is on the other line " * 4
QUESTIONS = [f"{DOCUMENT}{name}?" for name in ("who", "where", "when", "the one")]
SHORT = SamplingParams(max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("llm") / "llama", "llama")


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> LLM:
    return LLM(checkpoint, page_size=8, kv_cache_tokens=4096, max_batch_tokens=64)


@pytest.fixture
def llm(engine: LLM) -> Iterator[LLM]:
    """The shared engine with a cold cache; after each test nothing may be held."""
    engine.cache.clear()
    yield engine
    assert_idle(engine)


@pytest.fixture(scope="module")
def make(checkpoint: Path) -> Callable[..., LLM]:
    """Return a factory of engines over the same checkpoint, with options of their own."""
    return lambda **options: LLM(checkpoint, **{"kv_cache_tokens": 2048, **options})


@pytest.fixture(scope="module")
def answers(make: Callable[..., LLM]) -> list[tuple[int, ...]]:
    """The answer to each question, generated alone without a cache."""
    alone = make(prefix_cache=False)
    return [alone.generate(question, SHORT)[0].token_ids for question in QUESTIONS]


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> Callable[[Sequence[int]], torch.Tensor]:
    """Return transformers' log probabilities [tokens, vocabulary] after each token."""
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager"
    ).eval()

    @torch.inference_mode()
    def logprobs(ids: Sequence[int]) -> torch.Tensor:
        scores: torch.Tensor = model(torch.tensor([list(ids)])).logits[0].double().log_softmax(-1)
        return scores

    return logprobs


def assert_report_adds_up(output: RequestOutput) -> None:
    assert output.cache.prompt_tokens == len(output.prompt_token_ids)


# -- what generate takes and gives -----------------------------------------------------------


def test_a_text_ids_or_a_list_of_either(llm: LLM) -> None:
    """The same prompt in every form gives the same answer, in the order of the prompts."""
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode("the rain")
    forms: list[Any] = [
        "the rain",
        ids,
        list(ids),
        tuple(ids),
        ["the rain", "the rain"],
        [list(ids), ids],
        ["the rain", list(ids)],
    ]

    outputs = [output for form in forms for output in llm.generate(form, SHORT)]

    assert len(outputs) == 10
    assert len({output.token_ids for output in outputs}) == 1
    assert {output.prompt_token_ids for output in outputs} == {tuple(ids)}
    assert {output.prompt for output in outputs} == {"the rain", None}
    assert outputs[0].text == llm.tokenizer.decode(outputs[0].token_ids)
    assert len({output.request_id for output in outputs}) == 10


def test_no_prompts_no_outputs(llm: LLM) -> None:
    """An empty list of prompts is not an error."""
    assert llm.generate([]) == []


def test_params_for_all_or_one_each(llm: LLM) -> None:
    """A list of params is matched to the prompts in order; a different length is refused."""
    params = [SamplingParams(max_tokens=count, ignore_eos=True) for count in (1, 3, 2)]

    outputs = llm.generate(["a", "b", "c"], params)

    assert [len(output.token_ids) for output in outputs] == [1, 3, 2]
    assert {output.finish_reason for output in outputs} == {FinishReason.LENGTH}
    with pytest.raises(InvalidParamsError, match=r"2 values.*one for each prompt, 3"):
        llm.generate(["a", "b", "c"], params[:2])


def test_a_shared_document_is_computed_once(llm: LLM, answers: list[tuple[int, ...]]) -> None:
    """A shared document is computed once when cold and read when warm; answers do not change."""
    assert llm.tokenizer is not None
    whole = (len(llm.tokenizer.encode(DOCUMENT)) - 1) // 8 * 8

    for warm in (False, True):
        before = llm.core.num_computed_tokens
        outputs = llm.generate(QUESTIONS, SHORT)
        for output, answer in zip(outputs, answers, strict=True):
            assert_report_adds_up(output)
            assert output.token_ids == answer
            assert output.cache.recomputed_tokens == 0
        num_cached = [output.cache.read_tokens + output.cache.shared_tokens for output in outputs]
        assert all(tokens >= whole for tokens in num_cached[0 if warm else 1 :])
        prompt_steps = llm.core.num_computed_tokens - before - sum(len(a) - 1 for a in answers)
        assert prompt_steps == sum(output.cache.computed_tokens for output in outputs)
        if not warm:
            assert outputs[0].cache.computed_tokens == len(outputs[0].prompt_token_ids)


@pytest.mark.parametrize(
    "options",
    [
        {"page_size": 1, "max_batch_tokens": 1, "max_num_seqs": 2},
        {"page_size": 3, "max_batch_tokens": 7},
        {"page_size": 16, "max_num_seqs": 1},
        {"page_size": 8, "kv_cache_tokens": 200},
        {"prefix_cache": False, "max_batch_tokens": 50},
        {"attention_backend": "eager"},
        {"attention_backend": "cpu"},
    ],
    ids=str,
)
def test_no_option_changes_an_answer(
    make: Callable[..., LLM], answers: list[tuple[int, ...]], options: dict[str, Any]
) -> None:
    """Page size, budget, rows, a small pool, cache off and other backends give the same answers."""
    llm = make(**options)

    outputs = llm.generate([*QUESTIONS, *QUESTIONS], SHORT)

    assert [output.token_ids for output in outputs] == [*answers, *answers]
    for output in outputs:
        assert_report_adds_up(output)
        if options.get("prefix_cache") is False:
            assert output.cache.reason == "prefix_cache=False"
            assert output.cache.computed_tokens == len(output.prompt_token_ids)
    assert_idle(llm)


def test_a_pool_that_runs_out_preempts_and_goes_on(make: Callable[..., LLM]) -> None:
    """Six requests in a pool for two are preempted and give the tokens of a large pool."""
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    prompts = [f"{name} in the rain" for name in ("one", "two", "three", "four", "five", "six")]
    small, large = make(kv_cache_tokens=120, page_size=4), make()

    outputs = small.generate(prompts, params)

    assert any(output.metrics.preemptions for output in outputs)
    assert any(output.cache.recomputed_tokens for output in outputs)
    wanted = large.generate(prompts, params)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in wanted]
    assert_idle(small)


def test_sdpa_serves_when_bits_may_differ(make: Callable[..., LLM]) -> None:
    """sdpa needs exact=False; with exact=True the error says why."""
    for backend in ("sdpa", "auto"):
        llm = make(exact=False, attention_backend=backend)
        assert len(llm.generate("the rain", SHORT)[0].token_ids) == 6
        assert_idle(llm)
    with pytest.raises(ConfigError, match="attention_backend='sdpa' cannot be used here"):
        make(attention_backend="sdpa")


def test_the_pool_has_what_was_asked_in_whole_pages(make: Callable[..., LLM]) -> None:
    """kv_cache_tokens is rounded down to whole pages."""
    llm = make(kv_cache_tokens=100, page_size=16)

    assert llm.cache.core.num_pages == 6
    assert llm.config.kv_cache_tokens == 96


def test_bfloat16_answers_and_repeats_itself(make: Callable[..., LLM]) -> None:
    """Warm equals cold in bfloat16 too."""
    llm = make(dtype="bfloat16", page_size=4)

    cold, warm = (llm.generate(QUESTIONS[0], SHORT)[0] for _ in range(2))

    assert cold.token_ids == warm.token_ids
    assert warm.cache.read_tokens > 0


def test_chat_goes_through_the_template(llm: LLM) -> None:
    """`chat` takes a conversation or a list, and the template writes the special tokens."""
    talk = [{"role": "user", "content": "hello"}]

    single = llm.chat(talk, SHORT)
    two = llm.chat([talk, [*talk, {"role": "assistant", "content": "x"}, *talk]], SHORT)

    assert llm.tokenizer is not None
    assert llm.tokenizer.decode(single[0].prompt_token_ids, skip_special_tokens=False) == (
        "<|bos|><|user|>hello<|end|><|assistant|>"
    )
    assert [output.token_ids for output in single] == [two[0].token_ids]
    assert len(two) == 2
    [refused] = llm.chat([{"role": "nobody", "content": "x"}], SHORT)
    assert isinstance(refused.error, ChatTemplateError)
    assert "unknown role nobody" in str(refused.error)


# -- what ends a request ---------------------------------------------------------------------


def test_a_stop_text_is_found_across_tokens(llm: LLM) -> None:
    """The output ends before the stop text, even if that spans several tokens."""
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    whole = llm.generate(QUESTIONS[0], params)[0]
    at = next(
        at
        for at in range(3, len(whole.text) - 3)
        if whole.text[at : at + 3].isprintable() and "\ufffd" not in whole.text[at : at + 3]
    )
    stop = whole.text[at : at + 3]

    output = llm.generate(
        QUESTIONS[0], SamplingParams(max_tokens=30, ignore_eos=True, stop=["~nowhere~", stop])
    )[0]

    assert output.text == whole.text[: whole.text.index(stop)]
    assert output.token_ids == whole.token_ids[: len(output.token_ids)]
    assert output.finish_reason is FinishReason.STOP
    assert output.completions[0].stop_reason == stop


def test_a_stop_id_ends_the_output_and_is_in_its_ids(llm: LLM) -> None:
    """A stop id is in the output's ids but not in its text."""
    whole = llm.generate(QUESTIONS[1], SamplingParams(max_tokens=12, ignore_eos=True))[0]
    token = whole.token_ids[7]
    first = whole.token_ids.index(token)

    output = llm.generate(
        QUESTIONS[1], SamplingParams(max_tokens=12, ignore_eos=True, stop_token_ids=[token])
    )[0]

    assert output.token_ids == whole.token_ids[: first + 1]
    assert llm.tokenizer is not None
    assert output.text == llm.tokenizer.decode(whole.token_ids[:first])
    assert output.completions[0].stop_reason == token


def test_max_tokens_may_be_one_or_none(make: Callable[..., LLM]) -> None:
    """max_tokens=1 gives a single token; None generates until the context is full."""
    llm = make(max_model_len=40)

    shortest = llm.generate([[5] * 10, [5] * 39], SamplingParams(max_tokens=1, ignore_eos=True))
    none = llm.generate([5] * 10, SamplingParams(max_tokens=None, ignore_eos=True))[0]

    assert [len(output.token_ids) for output in shortest] == [1, 1]
    assert len(none.token_ids) == 30
    assert none.token_ids[0] == shortest[0].token_ids[0]
    assert none.finish_reason is FinishReason.LENGTH


# -- log probabilities -----------------------------------------------------------------------


def close(entry: TokenLogprob, row: torch.Tensor) -> bool:
    """Return whether the reported log probability and the top ones equal those of `row`."""
    top = row.topk(max(1, len(entry.top))).values.tolist()[: len(entry.top)]
    return (
        type(entry.logprob) is float
        and math.isclose(entry.logprob, float(row[entry.token_id]), abs_tol=1e-4)
        and all(
            math.isclose(a, b, abs_tol=1e-4) for a, b in zip(entry.top.values(), top, strict=True)
        )
        and all(math.isclose(a, float(row[i]), abs_tol=1e-4) for i, a in entry.top.items())
    )


@pytest.mark.parametrize("count", [0, 1, 5, 300, 1000])
def test_logprobs_are_those_of_transformers(
    llm: LLM, oracle: Callable[[Sequence[int]], torch.Tensor], count: int
) -> None:
    """Log probabilities of drawn and top tokens equal those of transformers."""
    params = SamplingParams(max_tokens=5, ignore_eos=True, logprobs=count)

    output = llm.generate(QUESTIONS[2], params)[0]

    assert output.logprobs is not None
    assert [score.token_id for score in output.logprobs] == list(output.token_ids)
    rows = oracle([*output.prompt_token_ids, *output.token_ids])[len(output.prompt_token_ids) - 1 :]
    for score, row in zip(output.logprobs, rows[:-1], strict=True):
        assert len(score.top) == min(count, 300)
        assert close(score, row)
        if score.top:
            assert next(iter(score.top)) == score.token_id, "greedy takes the likeliest"
        if count >= 300:
            assert math.isclose(sum(map(math.exp, score.top.values())), 1.0, abs_tol=1e-9)


@pytest.mark.parametrize("warm", [False, True])
def test_prompt_logprobs_are_those_of_transformers(
    llm: LLM, oracle: Callable[[Sequence[int]], torch.Tensor], warm: bool
) -> None:
    """Prompt logprobs recompute the whole prompt, report why, and leave it cached."""
    if warm:
        llm.generate(QUESTIONS, SHORT)
    params = SamplingParams(max_tokens=2, ignore_eos=True, prompt_logprobs=3)

    output, mate = llm.generate([QUESTIONS[3], QUESTIONS[0]], [params, SHORT])
    reader = llm.generate(QUESTIONS[3], SHORT)[0]

    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    assert output.prompt_logprobs[0] is None
    rows = oracle(output.prompt_token_ids)
    for place, (score, row) in enumerate(zip(output.prompt_logprobs[1:], rows[:-1], strict=True)):
        assert score is not None
        assert score.token_id == output.prompt_token_ids[place + 1]
        assert len(score.top) == 3
        assert close(score, row)
    assert output.cache.computed_tokens == len(output.prompt_token_ids)
    assert output.cache.reason == "prompt_logprobs need the logits of every prompt token"
    assert mate.cache.reason is None
    # The longer answer of `warm` completed the page that the prompt ends in.
    num_before = len(output.prompt_token_ids) - 1
    assert reader.cache.read_tokens == (num_before if warm else num_before // 8 * 8)
    assert reader.prompt_logprobs is None


# -- seeds -----------------------------------------------------------------------------------


def test_a_seed_gives_the_same_draws_whatever_is_around(make: Callable[..., LLM]) -> None:
    """A seed gives the same draws alone or batched, cold or warm, chunked or not."""
    params = SamplingParams(temperature=0.9, top_p=0.95, top_k=50, seed=7, max_tokens=10)
    wanted = make(prefix_cache=False).generate(QUESTIONS[0], params)[0].token_ids
    llm = make(page_size=4, max_batch_tokens=30)
    others = [SamplingParams(temperature=1.2, seed=seed, max_tokens=9) for seed in range(3)]

    cold = llm.generate(QUESTIONS, [params, *others])[0]
    warm = llm.generate([*QUESTIONS[1:], QUESTIONS[0]], [*others, params])[3]

    assert cold.token_ids == warm.token_ids == wanted
    assert warm.cache.read_tokens > 0


def test_different_seeds_give_different_draws(llm: LLM) -> None:
    """Different seeds draw different tokens, and a request without a seed gets its own."""
    hot = [SamplingParams(temperature=2.0, max_tokens=12, ignore_eos=True, seed=s) for s in (1, 2)]
    fresh = SamplingParams(temperature=2.0, max_tokens=12, ignore_eos=True)

    outputs = llm.generate(["the rain"] * 4, [*hot, fresh, fresh])

    assert len({output.token_ids for output in outputs}) == 4


# -- step by step ----------------------------------------------------------------------------


def test_steps_tell_the_tokens_of_every_request_once(
    llm: LLM, answers: list[tuple[int, ...]]
) -> None:
    """Streamed tokens add up to the output; each request ends once and is taken once."""
    keys = [llm.add_request(question, SHORT) for question in QUESTIONS]
    pieces: dict[int, list[int]] = {key: [] for key in keys}
    ended: list[int] = []
    while llm.has_unfinished():
        for key, tokens, finished in llm.step():
            assert key not in ended
            pieces[key] += tokens
            ended += [key] * finished

    assert sorted(ended) == keys
    for key, answer in zip(keys, answers, strict=True):
        assert tuple(pieces[key]) == llm.take_output(key).token_ids == answer
        with pytest.raises(UnknownRequestError):
            llm.take_output(key)
    assert llm.step() == []


def test_abort_ends_a_request_now(llm: LLM, answers: list[tuple[int, ...]]) -> None:
    """An aborted request keeps its tokens, the others go on, and a second abort raises."""
    keys = [llm.add_request(question, SHORT) for question in QUESTIONS]
    for _ in range(6):
        llm.step()

    llm.abort(keys[0])
    with pytest.raises(UnknownRequestError):
        llm.abort(keys[0])
    while llm.has_unfinished():
        llm.step()

    gone = llm.take_output(keys[0])
    assert gone.finish_reason is FinishReason.ABORT
    assert gone.token_ids == answers[0][: len(gone.token_ids)]
    for key, answer in zip(keys[1:], answers[1:], strict=True):
        assert llm.take_output(key).token_ids == answer


def test_generate_beside_step_mixes_nothing_up(llm: LLM, answers: list[tuple[int, ...]]) -> None:
    """`step` still emits the tokens that an `add_request` request got during a `generate` call."""
    key = llm.add_request(QUESTIONS[0], SHORT)

    outputs = llm.generate(QUESTIONS[1:], SHORT)

    assert [output.token_ids for output in outputs] == answers[1:]
    streamed: list[int] = []
    while llm.has_unfinished():
        for _, tokens, _ in llm.step():
            streamed += tokens
    assert tuple(streamed) == answers[0] == llm.take_output(key).token_ids


def test_on_finished_sees_every_output_and_may_abort(llm: LLM) -> None:
    """A request that the callback aborts still has an output, and `generate` returns."""
    seen: list[RequestOutput] = []
    params = [SamplingParams(max_tokens=count, ignore_eos=True) for count in (1, 30, 3)]

    def on_finished(output: RequestOutput) -> None:
        if not seen:
            llm.abort(output.request_id + 1)
        seen.append(output)

    outputs = llm.generate(["a", "b", "c"], params, on_finished=on_finished)

    assert [output.finish_reason for output in outputs] == ["length", "abort", "length"]
    assert seen == [outputs[0], outputs[2]]


def test_an_error_in_on_finished_ends_the_call_and_its_requests(llm: LLM) -> None:
    """The callback's error reaches the caller, and no request of the call is left running."""

    def on_finished(output: RequestOutput) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        llm.generate(["a", "b", "c"], SamplingParams(max_tokens=1), on_finished=on_finished)

    assert_idle(llm)


def test_metrics_are_times_in_order(llm: LLM) -> None:
    """0 <= queue_s <= ttft_s <= total_s; the decode rate is positive."""
    for output in llm.generate(QUESTIONS, SHORT):
        metrics = output.metrics
        assert metrics.ttft_s is not None
        assert 0 <= metrics.queue_s <= metrics.ttft_s <= metrics.total_s < 60
        assert metrics.decode_tokens_per_s is not None
        assert metrics.decode_tokens_per_s > 0
        assert metrics.preemptions == 0
        assert output.usage.completion_tokens == 6
