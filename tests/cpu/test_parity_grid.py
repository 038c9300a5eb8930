"""Every backend against the reference over every feature; a skipped cell has a reason.

`python -m tests.cpu.test_parity_grid`, from the root, prints the table.
"""

import os

import pytest
import torch

from ramify.attention.backend import BACKENDS, AttentionBackend, backend_class
from ramify.attention.backends.eager import EagerBackend
from ramify.attention.spec import AttentionSpec
from tests.cpu.attention_cases import CPU, run, step_of, triton
from tests.cpu.attention_cases import spec_of as any_spec

pytest.importorskip("triton", reason="the interpreter of Triton's kernels comes with triton")

MLA = {"kind": "mla", "num_heads": 5, "num_kv_heads": 1, "head_dim": 40, "value_dim": 32}


def spec_of(**changes: object) -> AttentionSpec:
    """One K/V head unless the feature is about heads: the interpreter is slow."""
    return any_spec(**({"num_heads": 3, "num_kv_heads": 1} | changes))


FEATURES: dict[str, dict[str, object]] = {
    "mha": {"num_heads": 2, "num_kv_heads": 2},
    "gqa": {"num_heads": 6, "num_kv_heads": 2, "page_size": 5},
    "mqa": {"num_heads": 5, "num_kv_heads": 1},
    "more heads than a tile has rows": {"num_heads": 20, "num_kv_heads": 1},
    **{f"head_dim {dim}": {"head_dim": dim} for dim in (64, 80, 96, 128, 192, 256)},
    **{f"page_size {size}": {"page_size": size} for size in (1, 3, 16, 64)},
    "window": {"windows": (9,)},
    "long window": {"windows": (100,)},
    "soft_cap": {"soft_cap": 1.5, "scale": 2.0},
    "window and soft_cap": {"soft_cap": 1.5, "scale": 2.0, "windows": (40,)},
    "value_dim": {"value_dim": 24},
    "bfloat16": {"dtype": torch.bfloat16},
    "float16": {"dtype": torch.float16},
    "float32 K/V": {"dtype": torch.bfloat16, "kv_dtype": torch.float32},
    "bfloat16 K/V": {"kv_dtype": torch.bfloat16},
    "int8 K/V": {"kv_dtype": torch.int8},
    "float8_e4m3 K/V": {"kv_dtype": torch.float8_e4m3fn, "dtype": torch.bfloat16},
    "float8_e5m2 K/V": {"kv_dtype": torch.float8_e5m2},
    "mla": MLA,
    "mla in bfloat16, int8 latents": MLA | {"dtype": torch.bfloat16, "kv_dtype": torch.int8},
    "mla, more heads than a tile has rows": MLA | {"num_heads": 20, "page_size": 3},
    "mla, sparse": MLA | {"sparse": True},
    "sparse": {"sparse": True, "page_size": 3},
    "sinks": {"sinks": True, "num_heads": 4},
    "sinks and window, exact": {"sinks": True, "num_heads": 4, "windows": (40,), "exact": True},
    "exact": {"exact": True},
    "exact, mla": MLA | {"exact": True},
}
# (cached, new): first chunks, later chunks, decode, drafts, splits of 64 keys and their edges
MIXED = [(0, 5), (37, 1), (130, 1), (63, 1), (60, 9)]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
SKIPPED_ON_CPU = {  # no feature is skipped by accident: the reason must have one of these words
    "sdpa": ("soft_cap", "value_dim", "kv_dtype", "kind=mla", "sparse", "exact", "sinks"),
    "cpu": ("float8_e5m2",),
    "blocked": ("value_dim", "kv_dtype", "kind=mla", "sparse"),
    "flex": ("sparse", "exact", "sinks"),
    "varlen": ("device cpu", "sinks"),
    "flashinfer": ("device cpu", "sinks"),
    "triton": (),
    "eager": (),
}


def backend_of(name: str, spec: AttentionSpec) -> AttentionBackend:
    """Triton with small tiles, the others with their defaults."""
    return triton(spec) if name == "triton" else backend_class(name)(spec, CPU)


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("name", [name for name in BACKENDS if name != "eager"])
def test_a_backend_agrees_with_the_reference_or_says_why_not(name: str, feature: str) -> None:
    """Every cell of the grid equals eager, or `supports` has a reason."""
    spec = spec_of(**FEATURES[feature])
    reason = backend_class(name).supports(spec, CPU)
    if reason is not None:
        assert any(word in reason for word in SKIPPED_ON_CPU[name]), reason
        return
    step = step_of(spec, MIXED)

    out = run(backend_of(name, spec), step, padding=3)

    expected = run(EagerBackend(spec, CPU), step)
    assert out.dtype == spec.dtype
    assert out.shape == (step.batch.num_tokens + 3, spec.num_heads, spec.v_head_dim)
    assert torch.equal(out[-3:], torch.zeros_like(out[-3:]))
    error = (out[:-3].double() - expected.double()).abs() / (1 + expected.double().abs())
    assert float(error.max()) < TOLERANCE[spec.dtype]


@pytest.mark.parametrize("split", [True, False], ids=["split", "whole"])
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "free"])
@pytest.mark.parametrize("window", [None, 1, 9, 64, 90])
def test_any_partition_of_a_step_agrees(window: int | None, exact: bool, split: bool) -> None:
    """Split or not, merged per split or not, windows that begin inside a split."""
    spec = spec_of(windows=(window,), exact=exact, num_heads=3, num_kv_heads=1)
    step = step_of(spec, MIXED)

    out = run(triton(spec, split=split), step)

    expected = run(EagerBackend(spec, CPU), step)
    assert float((out - expected).abs().max()) < 2e-5


def test_ab27_no_head_dim_needs_to_be_a_power_of_two_in_any_dtype() -> None:
    """80, 96 and 192 with scales, float8 and another `value_dim`."""
    for dim in (80, 96, 192):
        for kv_dtype in (torch.int8, torch.float8_e4m3fn, torch.bfloat16):
            spec = spec_of(head_dim=dim, kv_dtype=kv_dtype, value_dim=dim - 16)
            step = step_of(spec, [(20, 1), (0, 3)])

            out = run(triton(spec), step)

            expected = run(EagerBackend(spec, CPU), step)
            assert float((out - expected).abs().max()) < (2e-5 if kv_dtype.itemsize < 2 else 1e-2)


@pytest.mark.parametrize("name", BACKENDS)
def test_an_empty_batch_is_legal_everywhere(name: str) -> None:
    """No requests: padding rows come back as zeros."""
    spec = spec_of()
    if backend_class(name).supports(spec, CPU) is not None:
        pytest.skip(str(backend_class(name).supports(spec, CPU)))
    step = step_of(spec, [])

    assert torch.equal(run(backend_of(name, spec), step, padding=4), torch.zeros(4, 3, 16))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this torch has a CUDA device")
def test_without_cuda_every_gpu_backend_says_what_is_missing() -> None:
    """`supports` gives a reason for a missing device, without an exception."""
    for name in ("triton", "flashinfer", "varlen", "flex"):
        reason = backend_class(name).supports(spec_of(), torch.device("cuda"))

        assert reason is not None
        assert "CUDA" in reason or "not installed" in reason


def table() -> str:
    """The grid in Markdown: backends × features on CPU, with the reason of every skipped cell."""
    lines = [f"| feature | {' | '.join(BACKENDS)} |", "|---" * (len(BACKENDS) + 1) + "|"]
    reasons: list[str] = []
    for feature, changes in FEATURES.items():
        cells = []
        for name in BACKENDS:
            reason = backend_class(name).supports(spec_of(**changes), CPU)
            if reason is not None and reason not in reasons:
                reasons.append(reason)
            cells.append("yes" if reason is None else f"({reasons.index(reason) + 1})")
        lines.append(f"| {feature} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *(f"{n}. {reason}" for n, reason in enumerate(reasons, 1))])


if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"
    print(table())  # noqa: T201
