"""The executor of a device on the CPU: tokens, log probabilities and failures of the executor of the host."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ramify import LLM, SamplingParams, StructuredOutput
from ramify.engine.execution import device_executor, runner
from ramify.engine.execution.device_executor import DeviceExecutor
from ramify.engine.execution.device_sampler import (
    SampledRows,
    log_probabilities,
    row_sums,
    sample_rows,
)
from ramify.engine.execution.kernel_sampler import sample_by_kernels
from ramify.engine.logits.logits_processors import LogitsProcessor
from ramify.engine.step import SampleSpec
from ramify.outputs import RequestOutput, TokenLogprob
from ramify.testing import write_tiny_checkpoint
from tests.cpu.engine_cases import assert_idle
from tests.cpu.test_device import OneDevice

STEM = list(range(3, 40))
PARAMS = [
    SamplingParams(max_tokens=12, ignore_eos=True, logprobs=3),
    SamplingParams(max_tokens=9, temperature=0.9, seed=1, top_p=0.9),
    SamplingParams(max_tokens=15, temperature=1.2, seed=2, stop=["a", "e"], top_k=20, min_p=0.01),
    SamplingParams(max_tokens=7, repetition_penalty=1.3, frequency_penalty=0.2, logprobs=0),
    SamplingParams(max_tokens=8, n=3, temperature=1.0, seed=3, presence_penalty=0.5),
    SamplingParams(max_tokens=6, min_tokens=4, logit_bias={9: 4.0}, banned_sequences=[[9, 9]]),
    SamplingParams(max_tokens=4, prompt_logprobs=2, temperature=0.5, seed=4),
    SamplingParams(max_tokens=9, structured=StructuredOutput(regex="[a-c]{3,6}")),
    SamplingParams(max_tokens=9, allowed_token_ids=[30, 31, 32], temperature=2.0, seed=5),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("device"), "llama", num_hidden_layers=2)


def engine(checkpoint: Path, **options: Any) -> LLM:
    return LLM(checkpoint, kv_cache_tokens=1024, page_size=4, ops="torch", **options)


def on_device(llm: LLM, *, by_rejection: bool = False) -> LLM:
    llm.engine.core.executor = DeviceExecutor(llm.engine.runner, by_rejection=by_rejection)
    return llm


def assert_close(
    got: tuple[TokenLogprob | None, ...], wanted: tuple[TokenLogprob | None, ...]
) -> None:
    """The same tokens in the same order; float64 sums may round otherwise."""
    for entry, other in zip(got, wanted, strict=True):
        if entry is None or other is None:
            assert entry is other
            continue
        assert (entry.token_id, [*entry.top]) == (other.token_id, [*other.top])
        assert entry.logprob == pytest.approx(other.logprob, abs=1e-12)
        assert [*entry.top.values()] == pytest.approx([*other.top.values()], abs=1e-12)


def assert_same(got: list[RequestOutput], wanted: list[RequestOutput]) -> None:
    for output, reference in zip(got, wanted, strict=True):
        assert output.error is None
        assert output.cache == reference.cache
        for answer, other in zip(output.completions, reference.completions, strict=True):
            assert (answer.token_ids, answer.text) == (other.token_ids, other.text)
            assert answer.finish_reason == other.finish_reason
            assert_close(answer.logprobs or (), other.logprobs or ())
        assert_close(output.prompt_logprobs or (), reference.prompt_logprobs or ())


def test_answers_are_those_of_the_host(checkpoint: Path) -> None:
    """Every option of sampling, cold and from the cache, with decode steps begun ahead."""
    prompts = [STEM[: 15 + 2 * index] for index in range(len(PARAMS))]
    reference = engine(checkpoint)
    llm = on_device(engine(checkpoint))

    for _ in range(2):
        assert_same(llm.generate(prompts, PARAMS), reference.generate(prompts, PARAMS))
    assert_same(llm.generate(prompts[:3], PARAMS[:3]), reference.generate(prompts[:3], PARAMS[:3]))

    assert llm.engine.core.pipeline.num_ahead > 10
    assert_idle(llm)


def test_a_step_computes_and_samples_on_its_device(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Events, graphs and Triton's launches go to the current device of the thread, whatever their tensors."""
    entered = list[torch.device]()

    @contextmanager
    def current(device: torch.device) -> Iterator[None]:
        entered.append(device)
        yield
        entered.pop()

    def sample(*args: Any, **options: Any) -> SampledRows:
        assert entered
        return sample_rows(*args, **options)

    llm = on_device(engine(checkpoint))
    model = llm.engine.runner.model
    for name in ("forward", "logits", "embeddings"):
        compute = getattr(model, name)
        monkeypatch.setattr(model, name, lambda *args, f=compute: [f(*args), entered[0]][0])
    monkeypatch.setattr(device_executor, "sample_rows", sample)
    for module in (device_executor, runner):
        monkeypatch.setattr(module, "current", current)

    outputs = llm.generate([STEM, STEM[:9]], SamplingParams(max_tokens=3, prompt_logprobs=1))
    llm.embed([STEM])

    assert all(output.error is None for output in outputs)


def test_a_step_does_not_wait_for_the_device(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list that torch copies to a device makes the host wait for all that was queued there before."""
    llm = on_device(engine(checkpoint))

    def wait(make: Callable[..., torch.Tensor], data: Any, **options: Any) -> torch.Tensor:
        assert options.get("device") is None or isinstance(data, torch.Tensor), data
        return make(data, **options)

    for name in ("tensor", "as_tensor"):
        monkeypatch.setattr(torch, name, partial(wait, getattr(torch, name)))

    outputs = llm.generate([STEM[: 15 + 2 * index] for index in range(len(PARAMS))], PARAMS)

    assert all(output.error is None for output in outputs)
    assert llm.engine.core.pipeline.num_ahead > 5


@pytest.mark.parametrize("by_rejection", [False, True])
def test_drafts_are_verified_as_on_the_host(checkpoint: Path, by_rejection: bool) -> None:
    """Speculation accepts the same draft tokens, by equality or by rejection sampling."""
    options: dict[str, Any] = {"speculative": "ngram"}
    if by_rejection:
        options |= {"speculative_sampling": "rejection", "exact": False}
    prompts = [[5, 6, 7, 8] * 6, [9, 10, 11] * 7]
    params = [SamplingParams(max_tokens=30, ignore_eos=True, temperature=t, seed=2) for t in (0, 1)]
    wanted = engine(checkpoint, **options).generate(prompts, params)
    llm = on_device(engine(checkpoint, **options), by_rejection=by_rejection)

    assert_same(llm.generate(prompts, params), wanted)

    assert llm.stats().num_draft_tokens > 0


def test_embeddings_are_those_of_the_host(checkpoint: Path) -> None:
    """The pooled rows have the same bits."""
    wanted = engine(checkpoint).embed([STEM, STEM[:9]])

    assert (on_device(engine(checkpoint)).embed([STEM, STEM[:9]]) == wanted).all()


def test_damaged_kv_fails_its_own_request(checkpoint: Path) -> None:
    """A NaN in the K/V of one request is noticed with a step ahead in flight; the other goes on."""
    llm = on_device(engine(checkpoint))
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    wanted = [
        output.token_ids for output in engine(checkpoint).generate([STEM, STEM[::-1]], params)
    ]
    keys = [llm.add_request(prompt, params) for prompt in (STEM, STEM[::-1])]
    core, outputs = llm.engine.core, dict[int, RequestOutput]()
    for _ in range(4):
        llm.step()
    row = core.lifecycle.requests[keys[0]].sequence.row
    assert row is not None
    page = core.table.pages(row)[2]
    llm.engine.runner.pool.planes(1)["k"][page] = float("nan")

    while llm.has_unfinished():
        outputs |= {event.request_id: event.output for event in llm.step() if event.output}

    assert [outputs[key].token_ids for key in keys] == wanted
    assert core.stats().failures.failed_requests == 1
    assert_idle(llm)


@pytest.mark.parametrize("error", [RuntimeError("CUDA out of memory"), RuntimeError("other")])
def test_a_step_that_cannot_be_launched_is_planned_again(
    checkpoint: Path, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of memory is told from other errors; in a step ahead, the step before is kept."""
    llm = on_device(engine(checkpoint))
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    wanted = engine(checkpoint).generate([STEM], params)[0].token_ids
    forward, calls = llm.engine.runner.forward, list[int]()

    def fails_sometimes(*arguments: Any) -> torch.Tensor:
        calls.append(len(calls))
        if len(calls) in (1, 4):
            raise error
        return forward(*arguments)

    monkeypatch.setattr(llm.engine.runner, "forward", fails_sometimes)

    output = llm.generate([STEM], params)[0]

    assert output.token_ids == wanted
    counts = llm.engine.core.stats().failures
    assert counts.failed_steps == 2
    assert counts.out_of_memory == ("memory" in str(error))
    assert_idle(llm)


# -- nothing waits for the device --------------------------------------------------------------


def specs() -> list[SampleSpec]:
    """Rows of every kind: drafts, transforms, log probabilities."""
    rows: list[SampleSpec] = []
    for index, params in enumerate(PARAMS):
        processor: LogitsProcessor | None = None
        if params.structured is None and LogitsProcessor.is_needed(params):
            processor = LogitsProcessor(STEM, params, stop_token_ids=frozenset({2}), vocab_size=300)
        draft = (5, 6) if index == 2 else ()
        transform = None if processor is None else processor.for_step([9, 9], draft)
        rows.append(
            SampleSpec(index, len(rows), 7, params, index, params.logprobs, draft, transform)
        )
    return rows


@pytest.mark.parametrize("width", [1, 7, 300, 70_001])
def test_log_probabilities_do_not_depend_on_other_rows(width: int) -> None:
    """The same bits alone and in a batch, also of a row that torch sums with several threads."""
    logits = 3 * torch.randn(5, width, generator=torch.Generator().manual_seed(width))
    tokens, sums = torch.arange(5) % width, row_sums(logits.double().exp())

    scores = log_probabilities(logits, tokens, 3)

    for row in range(5):
        alone = log_probabilities(logits[row : row + 1], tokens[row : row + 1], 3)
        assert all(
            torch.equal(got[row], other[0]) for got, other in zip(scores, alone, strict=True)
        )
        weights = logits[row].double().exp()
        assert torch.equal(row_sums(weights[None].clone())[0], sums[row])
        assert float(sums[row]) == pytest.approx(math.fsum(weights.tolist()), rel=1e-14)


@pytest.mark.parametrize("by_rejection", [False, True])
def test_sampling_reads_nothing_back(by_rejection: bool) -> None:
    """On a device whose tensors have no values, all but the ids and flags of the rows stays there."""
    num_rows = sum(1 + len(spec.draft) for spec in specs())

    with OneDevice():
        rows = sample_rows(
            torch.empty(num_rows, 300, device="meta"), specs(), by_rejection=by_rejection
        )

    assert rows.tokens.shape == rows.are_finite.shape == rows.are_allowed.shape == (num_rows,)
    assert rows.scores is not None
    assert [scores.shape for scores in rows.scores] == [(2,), (2, 3), (2, 3)]
    assert rows.tokens.device.type == "meta"


def test_kernels_sample_what_torch_samples() -> None:
    """Triton's sampler, interpreted: tokens of every kind of row, flags and log probabilities."""
    num_rows = sum(1 + len(spec.draft) for spec in specs())
    logits = torch.randn(num_rows, 300, generator=torch.Generator().manual_seed(3))
    logits[0, 7] = torch.nan
    logits[6, 9] = torch.inf

    with np.errstate(invalid="ignore"):  # of the damaged rows, in the interpreter
        rows = sample_by_kernels(logits.clone(), specs())

    wanted = sample_rows(logits.clone(), specs(), by_rejection=False)
    usable = wanted.are_allowed.tolist()
    assert rows.are_finite.tolist() == wanted.are_finite.tolist()
    assert rows.are_allowed.tolist() == usable
    assert usable.count(False) == 2
    assert [*compress(rows.tokens.tolist(), usable)] == [*compress(wanted.tokens.tolist(), usable)]
    assert rows.scores is not None
    assert wanted.scores is not None
    for scores, references in zip(rows.scores, wanted.scores, strict=True):
        assert torch.equal(scores[1:], references[1:])  # row 0 is damaged
