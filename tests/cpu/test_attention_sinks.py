"""Attention sinks: a logit per head in the softmax's denominator, once however keys and prompts are cut."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ramify.attention.backend import BACKENDS, backend_class, select_backend
from ramify.attention.spec import AttentionSpec
from ramify.errors import ConfigError
from tests.budget import examples
from tests.cpu.attention_cases import CPU, Step, batch_of, pages_of, planes_of, spec_of

WITH_SINKS = ("eager", "blocked", "cpu")
SHARES = [(0, 5), (300, 1), (255, 1), (250, 20), (1000, 13), (0, 1), (40, 300)]
# Of four heads: usual, without weight, with nearly all of it, with all of it.
SINKS = torch.tensor([0.5, -200.0, 20.0, 300.0])


def step_of(spec: AttentionSpec, shares: list[tuple[int, int]]) -> tuple[Step, list[list[int]]]:
    noise = torch.Generator().manual_seed(len(shares))
    lengths = [cached + new for cached, new in shares]
    rows = pages_of(lengths, spec.page_size, noise)
    planes = planes_of(spec, rows, lengths, noise)
    batch = batch_of(spec, shares, rows)
    q = torch.randn(batch.num_tokens, spec.num_heads, spec.head_dim, generator=noise)
    return Step(batch, q.to(spec.dtype), planes, None), rows


def run(name: str, spec: AttentionSpec, step: Step, sinks: Tensor) -> Tensor:
    backend = select_backend(name, spec, CPU).backend
    return backend.run(backend.plan(step.batch), 0, step.q, step.planes, sinks=sinks)


def dense(spec: AttentionSpec, step: Step, sinks: Tensor) -> Tensor:
    """The definition, in float64: a key without a value whose score is the sink."""
    out = torch.zeros(step.q.shape, dtype=torch.float64)
    batch, window = step.batch, spec.windows[0]
    keys, values = (step.planes[name].flatten(0, 1).double() for name in "kv")
    for seq in range(batch.num_seqs):
        slots = torch.from_numpy(batch.kv_slots(seq).astype("int64"))
        for row in range(int(batch.cu_seqlens_q[seq]), int(batch.cu_seqlens_q[seq + 1])):
            position = int(batch.positions[row])
            first = 0 if window is None else max(0, position + 1 - window)
            visible = slots[first : position + 1]
            for head in range(spec.num_heads):
                shared = head // spec.gqa_group_size
                scores = keys[visible, shared] @ step.q[row, head].double() * spec.scale
                scores = torch.cat((scores, sinks[head : head + 1].double()))
                weights = scores.softmax(0)[:-1]
                out[row, head] = weights @ values[visible, shared]
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("name", WITH_SINKS)
def test_backends_agree_with_the_definition(
    name: str, window: int | None, dtype: torch.dtype
) -> None:
    """Mixed chunks and decodes, with and without a window; a sink of any size."""
    spec = spec_of(windows=(window,), sinks=True, exact=True, dtype=dtype)
    step, _ = step_of(spec, SHARES)

    out = run(name, spec, step, SINKS)

    error = (out.double() - dense(spec, step, SINKS)).abs().max()
    assert float(error) < (2e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("name", WITH_SINKS)
def test_a_sink_without_weight_is_none(name: str) -> None:
    """A sink of -inf gives the bits of attention without sinks."""
    spec = spec_of(sinks=True, exact=True)
    step, _ = step_of(spec, SHARES)
    plain = replace(spec, sinks=False)
    backend = select_backend(name, plain, CPU).backend

    out = run(name, spec, step, torch.full((4,), -math.inf))

    expected = backend.run(backend.plan(step.batch), 0, step.q, step.planes)
    if name == "eager":  # its softmax has a column more, which changes the order of a sum
        torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)
    else:
        assert torch.equal(out, expected)


@pytest.mark.parametrize("name", WITH_SINKS)
@settings(max_examples=examples(25), deadline=None)
@given(
    length=st.integers(1, 700),
    cut=st.integers(0, 699),
    others=st.lists(st.tuples(st.integers(0, 600), st.integers(1, 40)), max_size=3),
    window=st.sampled_from([None, 1, 100, 300]),
)
def test_a_row_has_one_result(
    name: str,
    length: int,
    cut: int,
    others: list[tuple[int, int]],
    window: int | None,
) -> None:
    """The same bits for a row wherever a prompt is cut, whoever is in the batch, however its keys are split."""
    spec = spec_of(windows=(window,), sinks=True, exact=True)
    cut = min(cut, length - 1)
    whole, rows = step_of(spec, [(0, length), *others])
    expected = run(name, spec, whole, SINKS)[cut:length]

    part = whole.take(slice(cut, length), batch_of(spec, [(cut, length - cut)], rows[:1]))
    last = whole.take(slice(length - 1, length), batch_of(spec, [(length - 1, 1)], rows[:1]))

    assert torch.equal(run(name, spec, part, SINKS), expected)
    assert torch.equal(run(name, spec, last, SINKS), expected[-1:])


def test_other_backends_say_why_not() -> None:
    """Without sinks in its softmax, a backend is refused; "auto" takes one that has them."""
    for exact in (False, True):
        spec = spec_of(sinks=True, exact=exact)
        choice = select_backend("auto", spec, CPU)
        assert choice.name in WITH_SINKS
        for name in set(BACKENDS) - set(WITH_SINKS) - {"triton"}:  # its own tests have sinks
            assert backend_class(name).supports(spec, CPU) is not None
    reason = backend_class("sdpa").supports(spec_of(sinks=True), CPU)
    assert reason is not None
    assert "sinks" in reason


@pytest.mark.parametrize("sinks", [None, SINKS[:3], SINKS.double(), SINKS[::2].repeat(4)[::2]])
def test_wrong_sinks_are_refused(sinks: Tensor | None) -> None:
    """The kernel reads sinks by address, so their shape, dtype and order are checked."""
    pytest.importorskip("numba", reason="the kernels need the extra ramify[cpu]")
    spec = spec_of(sinks=True, exact=True)
    step, _ = step_of(spec, [(0, 3)])
    backend = select_backend("cpu", spec, CPU).backend

    with pytest.raises(ConfigError, match=r"must be float32 \[4\]"):
        backend.run(backend.plan(step.batch), 0, step.q, step.planes, sinks=sinks)


def test_sinks_of_a_model_without_them_are_refused() -> None:
    """The kernel reads no sinks that the spec did not announce."""
    pytest.importorskip("numba", reason="the kernels need the extra ramify[cpu]")
    spec = spec_of(exact=True)
    step, _ = step_of(spec, [(0, 3)])
    backend = select_backend("cpu", spec, CPU).backend

    with pytest.raises(ConfigError, match="must be None"):
        backend.run(backend.plan(step.batch), 0, step.q, step.planes, sinks=SINKS)
