"""Quantised weights: int8 per output channel, through a linear and through a whole decoder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from ramify.attention.exactness import ProbeStore, batch_variant_row_counts
from ramify.errors import ConfigError
from ramify.models.checkpoint.changed_weights import INT8_GROUP
from ramify.models.loader import load_model
from ramify.models.ops.quantized import QuantizedWeight, WeightFormat, as_tensor, concat_weights
from ramify.models.ops.torch_linear import TorchLinear, choose_torch_linear
from ramify.models.ops.weight_rounding import quantize_weight
from ramify.testing import write_tiny_checkpoint
from tests.cpu.engine_cases import Model, cold
from tests.cpu.test_exact_ops import random, run_in_steps
from tests.cpu.tiny_models import ops_of

# Of names in these families.
ROUNDED = ("_proj.weight", "_with_mqa.weight", "embed_tokens.weight", "lm_head.weight")
DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_rounds_to_the_nearest_of_255_steps(dtype: torch.dtype) -> None:
    """By half a step of the row's own scale; the largest element of a row is exact."""
    weight = random(9, 40, dtype=dtype) * torch.logspace(-3, 3, 9)[:, None].to(dtype)

    quantized = QuantizedWeight.int8(weight)

    assert (quantized.codes.dtype, quantized.shape, len(quantized)) == (torch.int8, (9, 40), 9)
    assert (quantized.group_size, quantized.scales.shape) == (40, (9, 1))
    restored = quantized.dequantize()
    assert restored.dtype == dtype
    rounding = 0 if dtype == torch.float32 else weight.float().abs() * 2**-8
    error = (restored.float() - weight.float()).abs()
    assert bool((error <= 0.5001 * quantized.scales + rounding).all())
    assert torch.equal(quantized.codes.abs().amax(1), torch.full((9,), 127, dtype=torch.int8))


def test_scales_belong_to_groups_of_a_row() -> None:
    """`group_size` elements share a scale, whatever made the codes."""
    codes = torch.arange(12, dtype=torch.int8).view(2, 6)
    scales = torch.tensor([[1.0, 10.0], [100.0, 1000.0]])
    weight = QuantizedWeight(WeightFormat(8, 3), codes, scales, None, torch.float32)

    assert weight.dequantize().tolist() == [
        [0, 1, 2, 30, 40, 50],
        [600, 700, 800, 9000, 10000, 11000],
    ]


def test_offsets_are_added_and_the_last_group_may_be_short() -> None:
    """A row of 5 in groups of 2 has three of them; matrices one above the other keep their offsets."""
    codes = torch.tensor([[1, 2, 3, 4, 5]], dtype=torch.int8)
    scales, mins = torch.tensor([[1.0, 10.0, 100.0]]), torch.tensor([[0.5, -0.5, 0.25]])
    weight = QuantizedWeight(
        WeightFormat(4, 2, has_min=True, levels=tuple(range(16))),
        codes,
        scales,
        mins,
        torch.float32,
    )

    merged = as_tensor(concat_weights([weight, weight]))

    assert merged.tolist() == [[1.5, 2.5, 29.5, 39.5, 500.25]] * 2


def test_rows_take_their_scales_and_offsets_along() -> None:
    """In the order of the numbers; the order that rotary pairs are given at load."""
    codes = torch.arange(24, dtype=torch.int8).view(4, 6)
    scales, mins = random(4, 2), random(4, 2, seed=1)
    kind = WeightFormat(8, 3, has_min=True)
    plain = QuantizedWeight(WeightFormat(8, 3), codes, scales, None, torch.float32)
    index = torch.tensor([2, 0, 3])

    for weight in (plain, QuantizedWeight(kind, codes, scales, mins, torch.float32)):
        assert torch.equal(weight.rows(index).dequantize(), weight.dequantize()[index])


def test_concatenated_weights_stay_quantized_if_all_are() -> None:
    """A float matrix among them makes the result a float matrix."""
    first, second = (QuantizedWeight.int8(random(rows, 6, seed=rows)) for rows in (3, 5))
    expected = torch.cat([first.dequantize(), second.dequantize()])

    merged = concat_weights([first, second])
    mixed = concat_weights([first, second.dequantize()])

    assert isinstance(merged, QuantizedWeight)
    assert isinstance(mixed, Tensor)
    assert concat_weights([first]) is first
    assert torch.equal(as_tensor(merged), expected)
    assert torch.equal(mixed, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_linear_of_codes_is_that_of_the_dequantized_matrix(dtype: torch.dtype) -> None:
    """Batch-invariant; oneDNN, which would keep a float copy, is refused with that reason."""
    weight, bias = QuantizedWeight.int8(random(100, 64, dtype=dtype)), random(100, dtype=dtype)

    linear, verdict = choose_torch_linear(weight, bias, exact=True, store=ProbeStore(None))

    rows = random(521, 64, dtype=dtype, seed=5)
    expected = F.linear(rows, weight.dequantize(), bias)
    assert batch_variant_row_counts(linear, rows) == ()
    assert verdict.strategy != "onednn"
    torch.testing.assert_close(linear(rows), expected, rtol=2e-2, atol=1e-2)
    with pytest.raises(ConfigError, match="int8 codes: oneDNN would keep a dequantised copy"):
        TorchLinear(weight, strategy="onednn")


@pytest.mark.parametrize("ops", ["cpu", "torch"])
@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_a_quantized_model_is_the_model_of_the_dequantized_weights(
    tmp_path: Path, family: str, ops: str
) -> None:
    """The same bits with padded linears; whatever the operations, no row depends on the batch."""
    if ops == "cpu":
        pytest.importorskip("numba", reason="the kernels need the extra ramify[cpu]")
    path = write_tiny_checkpoint(tmp_path / "float", family, tokenizer=False)  # type: ignore[arg-type]
    rounded = write_tiny_checkpoint(tmp_path / "rounded", family, tokenizer=False)  # type: ignore[arg-type]
    tensors = load_file(path / "model.safetensors")
    for name in [name for name in tensors if name.endswith(ROUNDED)]:
        tensors[name] = quantize_weight(tensors[name], 8, INT8_GROUP).dequantize()
    save_file(tensors, rounded / "model.safetensors", metadata={"format": "pt"})
    tokens = torch.randint(0, 290, (61,), generator=torch.Generator().manual_seed(3))

    model = load_model(path, ops=ops, quantize="int8", store=ProbeStore(None))
    hidden, logits = run_in_steps(model, tokens, 61)

    for step in (1, 8, 13):
        assert torch.equal(run_in_steps(model, tokens, step)[1], logits), f"{step} rows at a time"
    reference = load_model(rounded, ops=ops_of("padded"), store=ProbeStore(None))
    expected, _ = run_in_steps(reference, tokens, 61)
    if ops == "torch":
        assert torch.equal(hidden, expected)
    # The kernels round rows to int16.
    assert (hidden - expected).norm() < 1e-3 * expected.norm()
    exact = load_model(path, ops=ops, store=ProbeStore(None))
    assert (run_in_steps(exact, tokens, 61)[0] - hidden).norm() > 1e-3 * expected.norm()


@pytest.mark.parametrize("ops", ["auto", "torch"])
def test_latent_attention_keeps_what_is_used_by_head(tmp_path: Path, ops: str) -> None:
    """DeepSeek-V3.2: kv_b and the float32 weights of the index are not rounded; others are."""
    from tests.cpu.deepseek_cases import save_oracle  # skips where there is no transformers

    path = save_oracle("v32", tmp_path, num_hidden_layers=2).path
    tensors = load_file(path / "model.safetensors")
    kept = (".kv_b_proj.weight", ".weights_proj.weight")
    for name in [name for name in tensors if name.endswith(ROUNDED)]:
        if not name.endswith(kept):
            tensors[name] = quantize_weight(tensors[name], 8, INT8_GROUP).dequantize()
    rounded = tmp_path / "rounded"
    shutil.copytree(path, rounded, ignore=shutil.ignore_patterns("rounded"))
    save_file(tensors, rounded / "model.safetensors", metadata={"format": "pt"})

    logits = []
    for folder, quantize in ((path, "int8"), (rounded, "off")):
        model = load_model(folder, dtype="float32", ops=ops, quantize=quantize)
        logits.append(cold(Model("v32", model), tuple(range(3, 60))).logits.view(torch.float32))

    assert (logits[0] - logits[1]).norm() < 1e-3 * logits[1].norm()


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    """Before anything is loaded; the message names the known one."""
    with pytest.raises(ConfigError, match="quantize='int3' does not exist; use off, int8, int4"):
        load_model(tmp_path, quantize="int3")
