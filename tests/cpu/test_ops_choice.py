"""The choice of `Ops`, what it falls back to, and what it reports."""

from __future__ import annotations

import inspect
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ramify.attention.exactness import ProbeStore, row_by_row
from ramify.config import ACTIVATIONS
from ramify.config import OPS as OPS_NAMES
from ramify.config import QUANTIZE as QUANTIZE_NAMES
from ramify.errors import ConfigError
from ramify.models.checkpoint.changed_weights import QUANTIZE, ROW_BITS
from ramify.models.checkpoint.tensors import load_weights
from ramify.models.decoders.decoder import Decoder
from ramify.models.decoders.dense import DENSE
from ramify.models.loader import BINDINGS, load_model, read_config
from ramify.models.ops.cpu import cpu_ops
from ramify.models.ops.cpu.cpu_ops import CpuOps
from ramify.models.ops.cpu.experts import GroupedExperts
from ramify.models.ops.cpu.layers import FusedLayers
from ramify.models.ops.functional import per_head_matmul
from ramify.models.ops.layer_loop import LayerLoop
from ramify.models.ops.probe import cancelled_rows, probe_row_op
from ramify.models.ops.quantized import Weight, as_tensor
from ramify.models.ops.registry import OPS, select_ops
from ramify.models.ops.torch_linear import choose_torch_linear, strategy_order
from ramify.models.ops.torch_ops import TorchOps
from ramify.models.ops.weight_rounding import quantize_weight
from ramify.testing import write_tiny_checkpoint
from tests.cpu.test_exact_ops import run_in_steps
from tests.cpu.tiny_models import ops_of


@pytest.mark.parametrize(
    ("dtype", "has_bf16_dot", "has_amx", "strategies"),
    [
        (torch.float32, True, True, ("onednn", "padded", "blocks")),
        (torch.bfloat16, False, False, ("plain", "blocks")),
        (torch.bfloat16, True, False, ("onednn", "plain", "blocks")),
        (torch.bfloat16, False, True, ("blocks",)),
        (torch.bfloat16, True, True, ("blocks",)),
    ],
)
def test_what_is_tried_depends_on_cpu_features(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    has_bf16_dot: bool,
    has_amx: bool,
    strategies: tuple[str, ...],
) -> None:
    """oneDNN in bfloat16 only with AVX-512-BF16, nothing but blocks with AMX; our kernels before torch."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_bf16_dot, raising=False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_amx, raising=False)

    choice = select_ops("auto", dtype, torch.device("cpu"))

    assert strategy_order(dtype) == strategies
    if CpuOps.supports(dtype, torch.device("cpu")) is None:
        assert choice.name == "cpu"
    assert choice.rejected.keys() == OPS.keys() - {choice.name}


def test_the_option_names_every_implementation() -> None:
    """`ramify.config`, which loads no torch, repeats the names of the table."""
    assert ("auto", *OPS) == OPS_NAMES
    assert QUANTIZE == QUANTIZE_NAMES
    assert tuple(ROW_BITS) == ACTIVATIONS


def test_a_kernel_that_fails_its_probe_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's operations take its place and are what the report names; the model is still exact."""
    pytest.importorskip("numba", reason="the kernels need the extra ramify[cpu]")
    path = write_tiny_checkpoint(tmp_path, "qwen3", tokenizer=False)
    tokens = torch.arange(40) + 100

    def rejected(op: Any, *args: Any, **options: Any) -> Any:
        chosen, verdict = probe_row_op(op, *args, **options)
        is_kernel = options.get("strategy") == "kernel"
        return (row_by_row(chosen), verdict) if is_kernel else (chosen, verdict)

    monkeypatch.setattr(cpu_ops, "probe_row_op", rejected)
    model = load_model(path, ops="cpu", store=ProbeStore(None))

    assert isinstance(model.layers, LayerLoop)
    report = model.exactness()
    assert {entry.operation for entry in report} == {
        "linear", "rms_norm", "qk_norm", "rope", "silu_mul"
    }  # fmt: skip
    assert "kernel" not in {entry.strategy for entry in report}
    logits = run_in_steps(model, tokens, 40)[1]
    assert torch.equal(run_in_steps(model, tokens, 7)[1], logits)
    expected = load_model(path, ops="torch", store=ProbeStore(None))
    assert torch.equal(run_in_steps(expected, tokens, 40)[1], logits)


@pytest.mark.parametrize("missing", [0, 16])
def test_layers_whose_mlps_differ_are_fused(tmp_path: Path, missing: int) -> None:
    """Buffers fit the widest; the bits are those of one by one. A `down` that does not fit is refused."""
    pytest.importorskip("numba", reason="the kernels need the extra ramify[cpu]")
    path = write_tiny_checkpoint(tmp_path, "llama", tokenizer=False, num_hidden_layers=2)
    config = read_config(path)
    source = load_weights(path, config, dtype=torch.float32)
    weights = {name: as_tensor(weight) for name, weight in source.items()}
    mlp = "model.layers.1.mlp."
    for name in ("gate_proj", "up_proj"):
        weights[f"{mlp}{name}.weight"] = weights[f"{mlp}{name}.weight"][:-16]
    down = weights[f"{mlp}down_proj.weight"]
    weights[f"{mlp}down_proj.weight"] = down[:, : -16 - missing]

    def decoder(kind: type[CpuOps]) -> Decoder:
        ops = kind(
            weights, dtype=torch.float32, max_len=config.max_model_len, store=ProbeStore(None)
        )
        return Decoder(config, ops, DENSE)

    model, tokens = decoder(CpuOps), torch.arange(40) + 100
    if missing:
        assert isinstance(model.layers, LayerLoop)
        with pytest.raises(ConfigError, match=r"x is torch\.float32"):
            run_in_steps(model, tokens, 40)
        return
    assert isinstance(model.layers, FusedLayers)
    logits = run_in_steps(model, tokens, 40)[1]
    assert torch.equal(run_in_steps(model, tokens, 7)[1], logits)
    assert torch.equal(run_in_steps(decoder(LoopedOps), tokens, 40)[1], logits)


class LoopedOps(CpuOps):
    """The same kernels, called one by one."""

    stack = TorchOps.stack


def test_every_family_is_kept_from_devices() -> None:
    """The import contract lists the module of each family that a checkpoint can name."""
    pyproject = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    contracts = pyproject["tool"]["importlinter"]["contracts"]
    [listed] = [item["source_modules"] for item in contracts if item["id"] == "families"]

    modules = {inspect.getmodule(binding.layer) for binding in (DENSE, *BINDINGS.values())}

    assert {module.__name__ for module in modules if module is not None} <= {*listed}


def test_ops_are_chosen_by_name_or_refused_with_the_reason() -> None:
    """An unknown name lists all; a device without kernels gives the reason for no."""
    cpu, meta = torch.device("cpu"), torch.device("meta")
    assert select_ops("torch", torch.float32, cpu).reason == "asked for"
    choice = select_ops("auto", torch.float32, meta)
    assert choice.name == "torch"
    assert "device meta" in choice.rejected["cpu"]
    with pytest.raises(ConfigError, match=r"ops='gpu' does not exist; choose auto, cpu, torch"):
        select_ops("gpu", torch.float32, cpu)
    with pytest.raises(ConfigError, match=r"ops='cpu' cannot be used here: .*float16.*ops='auto'"):
        select_ops("cpu", torch.float16, cpu)


@pytest.mark.parametrize(
    ("ops", "operations"),
    [
        (
            "cpu",
            {
                "linear",
                "rms_norm + linear",
                "rms_norm + linear + silu_mul",
                "qk_norm + rope",
                "rms_norm",  # of embeddings
            },
        ),
        ("torch", {"linear", "rms_norm", "qk_norm", "rope", "silu_mul"}),
        ("padded", {"linear", "rms_norm", "qk_norm", "rope", "silu_mul"}),
    ],
)
def test_the_report_names_every_operation(tmp_path: Path, ops: str, operations: set[str]) -> None:
    """`exactness()`, which `ramify info` shows, has one entry per kernel, fused operations together."""
    if ops == "cpu":
        pytest.importorskip("numba", reason="the kernels need the extra ramify[cpu]")
    path = write_tiny_checkpoint(tmp_path, "qwen3", tokenizer=False)

    report = load_model(path, store=ProbeStore(None), ops=ops_of(ops)).exactness()

    assert {entry.operation for entry in report} == operations
    assert all(entry.dtype == "float32" and entry.reason for entry in report)


@pytest.mark.parametrize(("out_width", "in_width"), [(40, 20), (72, 14), (40, 40), (192, 576)])
def test_no_matrix_in_bfloat16_has_another_kernel_for_few_rows(
    out_width: int, in_width: int
) -> None:
    """Sums that cancel, of 16 matrices: a probe of one may miss what another shows."""
    for seed in range(16):
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(4, out_width, in_width, generator=generator).bfloat16()
        x = (3 * torch.randn(4, 300, in_width, generator=generator)).bfloat16()
        x = cancelled_rows(x, weight).transpose(0, 1).contiguous()
        linear, _ = choose_torch_linear(weight[0], None, exact=True, store=ProbeStore(None))
        rows, heads = linear(x[:, 0]), per_head_matmul(x, weight.mT)

        for count in (1, 2, 3, 4, 5, 17, 64, 100):
            assert torch.equal(linear(x[7 : 7 + count, 0]), rows[7 : 7 + count])
            assert torch.equal(per_head_matmul(x[7 : 7 + count], weight.mT), heads[7 : 7 + count])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("out_width", "in_width"), [(40, 20), (72, 14), (33, 70), (64, 64)])
def test_a_row_that_is_not_finite_reaches_no_other(
    dtype: torch.dtype, out_width: int, in_width: int
) -> None:
    """Kernels that read beyond a row multiply the next one by zero, which is NaN there."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(4, out_width, in_width, generator=generator).to(dtype)
    x = torch.randn(40, 4, in_width, generator=generator).to(dtype)
    linear, _ = choose_torch_linear(weight[0], None, exact=True, store=ProbeStore(None))
    rows, heads = linear(x[:, 0].contiguous()), per_head_matmul(x, weight.mT)
    damaged = [5, 6, 31, 39]
    x[damaged] = torch.nan
    others = [number for number in range(40) if number not in damaged]

    assert torch.equal(linear(x[:, 0].contiguous())[others], rows[others])
    assert torch.equal(per_head_matmul(x, weight.mT)[others], heads[others])


def test_experts_of_unlike_formats_are_computed_by_torch() -> None:
    """A checkpoint may keep one expert in full precision; its model loads and has the same bits by row."""
    pytest.importorskip("numba", reason="the kernels need the extra ramify[cpu]")
    names, weights = ("gate_proj", "up_proj", "down_proj"), dict[str, Weight]()
    for expert in range(3):
        for name in names:
            matrix = torch.randn(64, 64, generator=torch.Generator().manual_seed(expert))
            key = f"mlp.{expert}.{name}.weight"
            weights[key] = matrix if expert == 1 else quantize_weight(matrix, 8, 32)
    ops = CpuOps(weights, dtype=torch.float32, max_len=64, store=ProbeStore(None))

    experts = ops.experts("mlp.", num_experts=3, top_k=2, shared=None)

    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(9))
    routing = torch.tensor([[0.5, 0.5, 0.0]]).expand(9, 3)
    assert not isinstance(experts, GroupedExperts)
    assert torch.equal(experts(x, routing)[:1], experts(x[:1], routing[:1]))


def test_a_verdict_about_quantised_experts_is_one_of_their_arithmetic() -> None:
    """That of other bits, or of rows of other bits, is not taken for theirs."""
    pytest.importorskip("numba", reason="the kernels need the extra ramify[cpu]")
    matrix = torch.randn(64, 64, generator=torch.Generator().manual_seed(3))
    four, eight = quantize_weight(matrix, 4, 32), quantize_weight(matrix, 8, 32)
    short = replace(four, format=replace(four.format, row_bits=8))
    pairs: list[tuple[Weight, Weight]] = [
        (matrix, matrix),
        (four, four),
        (four, eight),
        (short, short),
    ]
    operations = list[str]()
    for gate_up, down in pairs:
        stems = {"gate_proj": gate_up, "up_proj": gate_up, "down_proj": down}
        weights = {
            f"mlp.{number}.{name}.weight": weight
            for number in range(2)
            for name, weight in stems.items()
        }
        ops = CpuOps(weights, dtype=torch.float32, max_len=64, store=ProbeStore(None))

        ops.experts("mlp.", num_experts=2, top_k=1, shared=None)

        operations += [verdict.operation for verdict in ops.exactness()]
    assert operations == [
        "experts",
        "experts, 4 bits",
        "experts, 4 bits, 8 bits",
        "experts, 4 bits by rows of 8",
    ]
