"""The CPU backends against the reference, with contexts of many key blocks."""

import pytest
import torch

from ramify.attention.backend import backend_class
from ramify.attention.backends.eager import EagerBackend
from tests.cpu.attention_cases import CPU, run, spec_of, step_of

MLA = {"kind": "mla", "num_heads": 5, "num_kv_heads": 1, "head_dim": 40, "value_dim": 32}
FEATURES: dict[str, dict[str, object]] = {
    "gqa": {"num_heads": 6, "num_kv_heads": 2, "page_size": 24},
    "mqa in bfloat16": {"num_heads": 5, "num_kv_heads": 1, "dtype": torch.bfloat16},
    "window": {"windows": (700,), "page_size": 5},
    "soft_cap": {"soft_cap": 3.0, "scale": 1.0},
    "head_dim 80": {"head_dim": 80, "page_size": 64},
    "value_dim": {"value_dim": 17},
    "int8": {"kv_dtype": torch.int8},
    "float8": {"kv_dtype": torch.float8_e4m3fn},
    "mla": MLA,
    "mla with int8 latents": MLA | {"kv_dtype": torch.int8},
    "sparse": {"sparse": True},
    "mla, sparse": MLA | {"sparse": True, "page_size": 3},
}
# (cached, new): up to 4k cached, at block edges, drafts, a later chunk, a first chunk
LONG = [(4096, 1), (4095, 3), (2047, 1), (2048, 1), (1500, 40), (0, 300)]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("name", ["cpu", "blocked", "sdpa"])
def test_long_contexts_agree_with_the_reference(name: str, feature: str) -> None:
    """Or `supports` has a reason; `cpu` supports them all."""
    spec = spec_of(**({"num_heads": 4, "num_kv_heads": 2} | FEATURES[feature]))
    reason = backend_class(name).supports(spec, CPU)
    if reason is not None:
        assert name != "cpu"
        return
    step = step_of(spec, LONG)

    out = run(backend_class(name)(spec, CPU), step)

    expected = run(EagerBackend(spec, CPU), step).double()
    error = (out.double() - expected).abs() / (1 + expected.abs())
    assert float(error.max()) < TOLERANCE[spec.dtype]
