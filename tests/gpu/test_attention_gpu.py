"""Attention on a CUDA device: parity, equal bits, no host sync, CUDA graphs."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from ramify.attention.backend import AttentionBackend, backend_class
from ramify.attention.backends.eager import EagerBackend
from ramify.attention.backends.triton import TritonBackend
from ramify.attention.batch import AttentionBatch
from ramify.attention.custom_op import AttentionCustomOp
from ramify.attention.spec import AttentionSpec
from tests.cpu.attention_cases import (
    CPU,
    Step,
    assert_same_bits,
    batch_of,
    run,
    sharing_rows,
    spec_of,
    step_of,
)

GPU = torch.device("cuda")
BACKENDS = ("triton", "flashinfer", "varlen", "flex", "sdpa")
BF16: dict[str, object] = {"dtype": torch.bfloat16, "head_dim": 128, "scale": 128**-0.5}
MLA: dict[str, object] = BF16 | {
    "kind": "mla",
    "num_heads": 16,
    "num_kv_heads": 1,
    "head_dim": 576,
    "value_dim": 512,
}
FEATURES: dict[str, dict[str, object]] = {
    "gqa": BF16 | {"num_heads": 8},
    "mha": BF16 | {"num_heads": 2},
    "mqa": BF16 | {"num_heads": 20, "num_kv_heads": 1},
    **{f"head_dim {dim}": BF16 | {"head_dim": dim} for dim in (64, 80, 96, 192, 256)},
    **{f"page_size {size}": BF16 | {"page_size": size} for size in (1, 3, 16, 64)},
    "window": BF16 | {"windows": (100,)},
    "soft_cap": BF16 | {"soft_cap": 20.0},
    "float16": BF16 | {"dtype": torch.float16},
    "float32": {"head_dim": 128},
    "int8 K/V": BF16 | {"kv_dtype": torch.int8},
    "float8 K/V": BF16 | {"kv_dtype": torch.float8_e4m3fn},
    "float8_e5m2 K/V": BF16 | {"kv_dtype": torch.float8_e5m2},
    "mla": MLA,
    "mla, int8": MLA | {"kv_dtype": torch.int8},
    "mla, sparse": MLA | {"sparse": True},
    "sparse": BF16 | {"sparse": True},
    "sinks": BF16 | {"sinks": True, "num_heads": 8},
    "sinks and window": BF16 | {"sinks": True, "num_heads": 8, "windows": (700,)},
    "exact": BF16 | {"exact": True},
    "exact, float32": {"head_dim": 64, "exact": True},
    "exact, mla": MLA | {"exact": True},
}
# (cached, new) over several splits of 512 keys
MIXED = [(0, 5), (37, 1), (1300, 1), (511, 1), (512, 1), (1000, 300), (4000, 4), (0, 1)]
TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
EXACT: dict[str, dict[str, object]] = {
    name: FEATURES[name] for name in ("exact", "exact, float32", "exact, mla")
} | {
    "int8": BF16 | {"exact": True, "kv_dtype": torch.int8},
    "sinks": BF16 | {"exact": True, "windows": (700,), "sinks": True},
    "window and soft_cap": BF16 | {"exact": True, "windows": (700,), "soft_cap": 20.0},
}


def on_gpu(step: Step) -> Step:
    selected = None if step.selected is None else step.selected.to(GPU)
    planes = {name: plane.to(GPU) for name, plane in step.planes.items()}
    sinks = None if step.sinks is None else step.sinks.to(GPU)
    return replace(step, q=step.q.to(GPU), planes=planes, selected=selected, sinks=sinks)


def made(name: str, spec: AttentionSpec) -> AttentionBackend:
    reason = backend_class(name).supports(spec, GPU)
    if reason is not None:
        pytest.skip(f"{name}: {reason}")
    return backend_class(name)(spec, GPU)


@contextmanager
def no_waiting() -> Iterator[None]:
    """Raise on any host sync with the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_agrees_with_the_reference(name: str, feature: str) -> None:
    """Every backend that supports a feature agrees with eager attention on CPU."""
    spec = spec_of(**FEATURES[feature])
    backend = made(name, spec)
    step = step_of(spec, MIXED, num_selected=600)

    actual = run(backend, on_gpu(step), padding=3).cpu()

    expected = run(EagerBackend(spec, CPU), step).double()
    assert torch.equal(actual[-3:], torch.zeros_like(actual[-3:]))
    error = (actual[:-3].double() - expected).abs() / (1 + expected.abs())
    assert float(error.max()) < TOLERANCE[spec.dtype]


@pytest.mark.parametrize("kind", EXACT)
def test_a_chunk_of_any_length_gives_the_bits_of_the_whole_prompt(kind: str) -> None:
    """Prefill in a step, chunks, drafts and decode give equal bits, with split keys or without."""
    spec, total = spec_of(**EXACT[kind]), 1301
    whole = on_gpu(step_of(spec, [(0, total)]))
    rows = [whole.batch.block_table[0].tolist()]
    expected = run(made("triton", spec), whole)

    for cached, new in ((512, 789), (1000, 200), (1290, 11), (1297, 4), (511, 1), (1300, 1)):
        part = whole.take(slice(cached, cached + new), batch_of(spec, [(cached, new)], rows))
        for enough in (0, 1 << 20):
            actual = run(TritonBackend(spec, GPU, saturating_programs=enough), part)
            assert_same_bits(actual, expected[cached : cached + new])


@pytest.mark.parametrize("kind", EXACT)
def test_batch_mates_and_sharing_change_no_bit(kind: str) -> None:
    """A request has equal bits alone, in a batch, and with a shared prefix read once."""
    spec = spec_of(**EXACT[kind])
    shares = [(2100, 1), (2080, 1), (1700, 3), (2300, 1), (700, 1)]
    shared = [(-1, 0), (0, 2048), (1, 1024), (0, 2048), (2, 512)]
    rows = sharing_rows([cached + new for cached, new in shares], shared, spec.page_size)
    step = on_gpu(step_of(spec, shares, rows=rows, sharing=shared))

    grouped = run(made("triton", spec), step)

    unshared = replace(step, batch=batch_of(spec, shares, rows))
    assert_same_bits(run(made("triton", spec), unshared), grouped)
    for seq, share in enumerate(shares):
        begin, end = step.batch.cu_seqlens_q[seq : seq + 2].tolist()
        alone = step.take(slice(begin, end), batch_of(spec, [share], [rows[seq]]))
        assert_same_bits(run(made("triton", spec), alone), grouped[begin:end])


@pytest.mark.parametrize("kind", ["gqa", "mla", "exact"])
def test_pb30_ab13_a_step_does_not_wait_for_the_device(kind: str) -> None:
    """`plan` and `run` make no host sync."""
    spec = spec_of(**FEATURES[kind])
    backend = made("triton", spec)
    step = on_gpu(step_of(spec, MIXED))
    expected = run(backend, step)

    with no_waiting():
        plan = backend.plan(step.batch)
        actual = backend.run(plan, 0, step.q, step.planes)

    assert_same_bits(actual, expected)


def test_ab26_a_queue_of_steps_is_not_corrupted() -> None:
    """Steps planned while earlier steps wait on the stream give the same outputs as alone."""
    spec = spec_of(**BF16)
    backend = made("triton", spec)
    rows = [list(range(200))]
    step = on_gpu(step_of(spec, [(1500, 1)], rows=rows))
    planes = {name: plane.nan_to_num() for name, plane in step.planes.items()}
    batches = [batch_of(spec, [(cached, 1)], rows) for cached in range(100, 1500, 50)]
    expected = [backend.run(backend.plan(b), 0, step.q, planes).clone() for b in batches]
    torch.cuda.synchronize()

    torch.cuda._sleep(50_000_000)
    actual = [backend.run(backend.plan(batch), 0, step.q, planes) for batch in batches]

    for output, reference in zip(actual, expected, strict=True):
        assert_same_bits(output, reference)


@pytest.mark.parametrize("kind", ["gqa", "exact", "mla"])
def test_a_captured_decode_step_serves_the_next_ones(kind: str) -> None:
    """A captured graph, replayed after a new plan, gives the bits of an eager call."""
    spec = spec_of(**FEATURES[kind])
    backend = made("triton", spec)
    rows = [list(range(200)), list(range(200, 400))]
    step = on_gpu(step_of(spec, [(1550, 1), (1550, 1)], rows=rows))
    planes = {name: plane.nan_to_num() for name, plane in step.planes.items()}

    def batch(cached: int) -> AttentionBatch:
        return batch_of(spec, [(cached, 1), (cached - 7, 1)], rows)

    plan = backend.plan(batch(1550))
    backend.run(plan, 0, step.q, planes)  # compiles, before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = backend.run(plan, 0, step.q, planes)

    for cached in (1550, 1551, 1560, 1580):
        following = backend.plan(batch(cached))
        assert following.signature == plan.signature
        graph.replay()
        assert_same_bits(out.clone(), backend.run(following, 0, step.q, planes))


class Attends(nn.Module):
    def __init__(self, attention: AttentionCustomOp, planes: dict[str, Tensor]) -> None:
        super().__init__()
        self.attention, self.planes = attention, planes

    def forward(self, q: Tensor) -> Tensor:
        return self.attention(0, q * 2, self.planes) + 1


@torch.inference_mode()
def test_a_compiled_decode_step_is_one_graph() -> None:
    """`torch.compile` makes one graph of a decode step, and the next step does not recompile."""
    spec = spec_of(**BF16)
    rows = [list(range(100))]
    step = on_gpu(step_of(spec, [(700, 1)], rows=rows))
    planes = {name: plane.nan_to_num() for name, plane in step.planes.items()}
    module = Attends(AttentionCustomOp(made("triton", spec), spec.v_head_dim), planes)
    compiled = torch.compile(module, fullgraph=True)

    for cached in (700, 701):
        module.attention.plan(batch_of(spec, [(cached, 1)], rows))
        with torch._dynamo.config.patch(error_on_recompile=cached > 700):
            assert torch.allclose(compiled(step.q), module(step.q), atol=1e-2)
