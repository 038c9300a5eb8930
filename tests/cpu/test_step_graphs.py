"""Decode steps by graphs, on the CPU by stand-ins: answers of the runner, nothing frozen that changes."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ramify import LLM, SamplingParams
from ramify.engine.execution.decode_rows import DecodeRows
from ramify.engine.execution.decode_sources import BackendSource, TorchSource
from ramify.engine.execution.device_executor import DeviceExecutor
from ramify.engine.execution.local_executor import LocalExecutor
from ramify.engine.execution.runner import ModelRunner
from ramify.engine.execution.staged_upload import NUM_STAGES, StagedUpload
from ramify.engine.execution.step_graphs import CudaGraphs, DecodeGraphs, row_bucket
from ramify.engine.step import StepPlan, StepResult
from ramify.errors import ConfigError
from ramify.testing import TinyFamily, write_tiny_checkpoint
from tests.budget import examples
from tests.cpu.engine_cases import assert_idle
from tests.cpu.recorded_graphs import LateStream, RecordedGraphs, RecordedStep
from tests.pure.whole_steps import WholeSteps, run_step

CPU = torch.device("cpu")
STEM = list(range(3, 40))


def engine(checkpoint: Path, *, exact: bool = False, **options: Any) -> LLM:
    return LLM(checkpoint, kv_cache_tokens=512, page_size=4, ops="torch", exact=exact, **options)


def by_graphs(llm: LLM, **options: Any) -> tuple[RecordedGraphs, DecodeGraphs, LateStream]:
    """Let the engine run its decode steps by recorded graphs."""
    graphs, stream, runner = RecordedGraphs(), LateStream(), llm.engine.runner
    spec, max_pages = llm.engine.attention_spec, llm.engine.config.max_table_pages
    assert TorchSource.supports(spec) is None
    source = TorchSource(spec, runner.pool, num_rows=64, max_pages=max_pages)
    decode = DecodeGraphs(runner, source, graphs, stream, num_rows=64, **options)
    llm.engine.core.executor = DeviceExecutor(runner, decode=decode)
    return graphs, decode, stream


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("mistral", {"sliding_window": 7}),
        ("qwen3", {"kv_dtype": "int8"}),
    ],
)
def test_answers_are_those_of_the_runner(
    family: TinyFamily, options: dict[str, Any], tmp_path: Path
) -> None:
    """Requests that come and go, in one bucket after another, with steps begun ahead."""
    window = (
        {"sliding_window": options.pop("sliding_window")} if "sliding_window" in options else {}
    )
    checkpoint = write_tiny_checkpoint(tmp_path, family, num_hidden_layers=1, **window)
    prompts = [STEM[: 5 + 6 * index] for index in range(4)]
    params = [
        SamplingParams(
            max_tokens=4 + 4 * index, ignore_eos=True, temperature=0.8 * (index % 2), seed=1
        )
        for index in range(4)
    ]
    wanted = engine(checkpoint, **options).generate(prompts, params)
    llm = engine(checkpoint, **options)
    graphs, decode, stream = by_graphs(llm)

    got = llm.generate(prompts, params)
    got_warm = llm.generate(prompts[:2], params[:2])

    assert [output.token_ids for output in got] == [output.token_ids for output in wanted]
    assert [output.token_ids for output in got_warm] == [output.token_ids for output in wanted[:2]]
    assert decode.num_captured == len(graphs.steps) < 8 < decode.num_replayed
    assert stream.num_copied == decode.num_replayed, "one upload for each step"
    assert llm.engine.core.pipeline.num_ahead > 5
    assert_idle(llm)


def test_a_backend_that_plans_for_graphs_is_captured(tmp_path: Path) -> None:
    """Triton's kernels, interpreted: later plans of a signature are read by the captured step."""
    checkpoint = write_tiny_checkpoint(tmp_path, "llama", num_hidden_layers=1)
    params = [SamplingParams(max_tokens=count, ignore_eos=True) for count in (4, 4, 4)]
    prompts = [STEM[:6], STEM[:5], STEM[3:9]]
    wanted = engine(checkpoint, attention_backend="triton").generate(prompts, params)
    llm = engine(checkpoint, attention_backend="triton")
    runner = llm.engine.runner
    source = BackendSource(runner.backend, runner.pool)
    decode = DecodeGraphs(runner, source, RecordedGraphs(), LateStream(), num_rows=8)
    llm.engine.core.executor = DeviceExecutor(runner, decode=decode)

    got = llm.generate(prompts, params)

    assert [output.token_ids for output in got] == [output.token_ids for output in wanted]
    assert 0 < decode.num_captured < decode.num_replayed
    assert_idle(llm)


class BothWays(WholeSteps):
    """Computes each decode step by graphs and by the runner, from the same K/V; answers as the runner."""

    def __init__(self, decode: DecodeGraphs, runner: ModelRunner) -> None:
        self._decode, self._runner, self._inner = decode, runner, LocalExecutor(runner)
        self.pairs: list[tuple[Tensor, Tensor]] = []  # logits of both

    def execute(self, plan: StepPlan) -> StepResult:
        if self._decode.can_run(plan):
            logits = self._decode.run(plan, None)[1].clone()
            rows = range(plan.batch.num_tokens)
            self.pairs.append((logits, self._runner.logits(self._runner.forward(plan), rows)))
        return run_step(self._inner, plan)

    def zero_pages(self, pages: Sequence[int]) -> None:
        self._inner.zero_pages(pages)

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._inner.copy_pages(pairs)


@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-5), ("bfloat16", 2.0**-5)])
def test_logits_are_those_of_the_runner_up_to_rounding(
    dtype: str, limit: float, tmp_path: Path
) -> None:
    """A token differs only where two logits are closer than their rounding.

    Graphs attend in float32, torch's backend in the model's dtype: in bfloat16 sampled tokens soon differ,
    as they do between two backends.
    """
    llm = engine(write_tiny_checkpoint(tmp_path, "llama", num_hidden_layers=2), dtype=dtype)
    _, decode, _ = by_graphs(llm)
    both = BothWays(decode, llm.engine.runner)
    llm.engine.core.executor = both

    llm.generate([STEM[: 5 + 6 * at] for at in range(4)], SamplingParams(max_tokens=16))

    assert decode.num_replayed == len(both.pairs) > 10
    for logits, wanted in both.pairs:
        size = limit * float(wanted.abs().max())
        assert float((logits - wanted).abs().max()) <= size
        best = wanted.topk(2).values
        is_clear = best[:, 0] - best[:, 1] > 2 * size
        assert torch.equal(logits.argmax(1)[is_clear], wanted.argmax(1)[is_clear])


def test_graphs_are_bounded_and_dropped_with_their_weights(tmp_path: Path) -> None:
    """The graph not used for longest goes; those of old weights all go."""
    checkpoint = write_tiny_checkpoint(tmp_path, "llama", num_hidden_layers=1)
    llm = engine(checkpoint)
    graphs, decode, _ = by_graphs(llm, max_graphs=2)
    params = SamplingParams(max_tokens=12, ignore_eos=True)

    first = llm.generate([STEM], params)  # one bucket
    others = [SamplingParams(max_tokens=count, ignore_eos=True) for count in (5, 8)]
    several = llm.generate([STEM, STEM[:9], STEM[:5]], [params, *others])

    assert len(decode._captured) == 2
    assert len(graphs.steps) > 2
    assert graphs.num_drops > 0
    assert first[0].token_ids == several[0].token_ids
    num_captured = decode.num_captured
    llm.reload_weights(checkpoint)
    assert llm.generate([STEM], params)[0].token_ids == first[0].token_ids
    assert decode.num_captured > num_captured


def test_a_step_that_fails_uploads_its_rows_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an upload that raised, the table on the device is not trusted."""
    llm = engine(write_tiny_checkpoint(tmp_path, "llama", num_hidden_layers=1))
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    wanted = llm.generate([STEM, STEM[::-1]], params)
    _, decode, stream = by_graphs(llm)
    llm.cache.clear()
    copy, calls = stream.copy, list[int]()

    def fails_sometimes(target: Tensor, source: Tensor) -> None:
        calls.append(len(calls))
        if len(calls) in (1, 5):
            raise RuntimeError("no copy")
        copy(target, source)

    monkeypatch.setattr(stream, "copy", fails_sometimes)

    got = llm.generate([STEM, STEM[::-1]], params)

    assert [output.token_ids for output in got] == [output.token_ids for output in wanted]
    assert isinstance(decode._source, TorchSource)
    rows = decode._source.rows
    table, held = rows.table.numpy(), rows._on_device
    assert ((table == held) | (held < 0)).all()
    assert llm.engine.core.stats().failures.failed_steps == 2


# -- the stand-ins find what a real device would not report ------------------------------------


def frozen_value(inputs: Tensor, step: list[int]) -> tuple[Tensor, ...]:
    return (inputs + step[0],)


def new_address(inputs: Tensor, step: list[int]) -> tuple[Tensor, ...]:
    return (inputs + torch.ones(3) * BUFFERS[step[0]],)


def other_shape(inputs: Tensor, step: list[int]) -> tuple[Tensor, ...]:
    return (inputs[: 1 + step[0]] * 2,)


def other_calls(inputs: Tensor, step: list[int]) -> tuple[Tensor, ...]:
    return (inputs.neg() if step[0] else inputs * 2,)


def waits(inputs: Tensor, step: list[int]) -> tuple[Tensor, ...]:
    return (inputs * inputs.sum().item(),)


def copies(inputs: Tensor, step: list[int]) -> tuple[Tensor, ...]:
    return (inputs * torch.tensor([1.0, 2.0, 3.0]),)


def waits_for_shape(inputs: Tensor, step: list[int]) -> tuple[Tensor, ...]:
    return (inputs.nonzero(),)


def waits_for_mask(inputs: Tensor, step: list[int]) -> tuple[Tensor, ...]:
    return (inputs[inputs > 0],)


def frozen_launch(inputs: Tensor, step: list[int]) -> tuple[Tensor, ...]:
    from ramify.kernels.triton.activation import gated_activation

    return (gated_activation(inputs.view(1, 3)[:, :2], "clamped_swiglu_mul", limit=float(step[0])),)


BUFFERS = [torch.ones(3), torch.ones(3)]


@pytest.mark.parametrize(
    "run",
    [
        frozen_value, new_address, other_shape, other_calls, waits, copies, waits_for_shape,
        waits_for_mask, frozen_launch,
    ],
)  # fmt: skip
def test_what_a_graph_freezes_is_found(
    run: Callable[[Tensor, list[int]], tuple[Tensor, ...]],
) -> None:
    """Python values, addresses, shapes and calls that differ at replay, and waits for the device.

    A kernel of Triton freezes what it is launched with.
    """
    inputs, step = torch.ones(3), [0]

    def capture_and_replay() -> None:
        captured = RecordedStep(lambda: run(inputs, step))
        step[0] = 1
        captured.replay()

    with pytest.raises(AssertionError):
        capture_and_replay()


def test_values_at_the_same_addresses_may_differ() -> None:
    """A replay computes with what the inputs hold by then."""
    inputs = torch.ones(3)
    captured = RecordedStep(lambda: ((inputs * 2).cumsum(0),))

    inputs.fill_(2.0)

    assert captured.replay()[0].tolist() == [4.0, 8.0, 12.0]


def test_a_buffer_that_is_still_copied_is_not_filled() -> None:
    """Each host buffer waits for its own last copy; without that the stand-in fails."""
    stream = LateStream()
    upload = StagedUpload(4, CPU, stream)
    for step in range(3 * NUM_STAGES):
        upload.fill()[:] = step
        upload.send(3)
        assert upload.on_device.tolist() == [step, step, step, 0]
    assert stream.num_waits == 2 * NUM_STAGES

    upload._has_event = [False] * NUM_STAGES  # forget to wait
    upload.fill()[:] = 99
    with pytest.raises(AssertionError, match="changed too early"):
        upload.send(3)


# -- the block table on the device ---------------------------------------------------------------


@settings(max_examples=examples(100), deadline=None)
@given(
    steps=st.lists(
        st.dictionaries(
            st.integers(0, 9), st.lists(st.integers(0, 30), min_size=1, max_size=5), max_size=4
        ),
        max_size=12,
    )
)
def test_the_table_has_the_pages_of_every_request(steps: list[dict[int, list[int]]]) -> None:
    """Whichever requests a step has, after its changes their rows hold their pages, and no more than those changed."""
    rows = DecodeRows(4, 6, padding_page=31, device=CPU)

    for step in steps:
        width = max(map(len, step.values()), default=0)
        table = np.array(
            [[*pages, *[-1] * (width - len(pages))] for pages in step.values()], np.int32
        )
        before = rows.table.clone()
        changes = rows.update(list(step), table.reshape(len(step), width))
        rows.table.view(-1)[torch.from_numpy(changes.entries)] = torch.from_numpy(changes.pages)

        assert len(set(changes.rows.tolist())) == len(step)
        for row, pages in zip(changes.rows.tolist(), step.values(), strict=True):
            assert rows.table[row, : len(pages)].tolist() == pages
        assert int((before != rows.table).sum()) == len(changes.entries)
        assert (rows.table[rows.padding_row] == 31).all()


def test_the_pages_of_the_step_before_are_not_compared_but_after_a_failure() -> None:
    """The same array for the same requests is no change; for others, or after `forget`, all its pages are."""
    rows = DecodeRows(2, 3, padding_page=31, device=CPU)
    table = np.array([[4, 5], [6, -1]], np.int32)
    first = rows.update((1, 2), table)
    assert first.pages.tolist() == [4, 5, 6]

    again, others = rows.update((1, 2), table), rows.update((2, 3), table)
    rows.forget()
    failed = rows.update((2, 3), table)

    assert not len(again.entries) and again.rows.tolist() == first.rows.tolist()
    assert others.pages.tolist() == [4, 5, 6]
    assert failed.pages.tolist() == [4, 5, 6]


class InterruptedId(int):
    """The id of a request; the user presses Ctrl-C when it has been looked up, and gets a row."""

    num_hashed = 0

    def __hash__(self) -> int:
        self.num_hashed += 1
        if self.num_hashed > 1:
            raise KeyboardInterrupt
        return int(self)


def test_an_interrupt_loses_no_row() -> None:
    """However often rows are given out in vain, as many requests as before find theirs."""
    rows, table = DecodeRows(2, 1, padding_page=31, device=CPU), np.array([[4], [5]], np.int32)

    for number in (1, 2):
        with pytest.raises(KeyboardInterrupt):
            rows.update((InterruptedId(number),), table[:1])
        rows.forget()

    assert sorted(rows.update((3, 4), table).rows.tolist()) == [0, 1]


def test_buckets_are_few_and_close() -> None:
    """1, 2, 4, multiples of 8, and multiples of what the model's rows are padded to."""
    assert [row_bucket(n) for n in (1, 2, 3, 4, 5, 8, 9, 17, 64)] == [1, 2, 4, 4, 8, 8, 16, 24, 64]
    assert [row_bucket(n, 8) for n in (1, 3, 9)] == [8, 8, 16]


def test_graphs_of_a_device_are_captured_on_a_stream_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own stream is on the device of the first capture of the process, which may be another engine's."""
    streams, captures = list[MagicMock](), list[dict[str, Any]]()

    def new_stream(device: torch.device) -> MagicMock:
        streams.append(MagicMock(device=device))
        return streams[-1]

    @contextmanager
    def capture(_graph: Any, **options: Any) -> Iterator[None]:
        captures.append(options)
        yield

    for name in ("current_stream", "stream", "CUDAGraph", "graph_pool_handle"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    monkeypatch.setattr(torch.cuda, "Stream", new_stream)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    graphs = CudaGraphs(torch.device("cuda", 1))

    for _ in range(2):
        graphs.capture(tuple)

    assert [stream.device.index for stream in streams] == [1]
    assert [options["stream"] for options in captures] == streams * 2
    assert {options["capture_error_mode"] for options in captures} == {"thread_local"}


def test_graphs_need_cuda(tmp_path: Path) -> None:
    """On a CPU there is nothing to capture; the error says what to leave out."""
    checkpoint = write_tiny_checkpoint(tmp_path, "llama", num_hidden_layers=1)

    with pytest.raises(ConfigError, match=r"decode_graphs=True .* cpu .* leave decode_graphs out"):
        engine(checkpoint, decode_graphs=True)
