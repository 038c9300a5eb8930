"""Small Llama checkpoints in the quantised formats of safetensors files, packed by code of our own."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ramify.testing import write_tiny_checkpoint
from tests.cpu.models.test_packed_formats import AWQ_COLUMNS, packed

SIZES = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "head_dim": 32}
# The tensors of a layer by suffix, and its matrix [out, in] in float32, from a shape and a generator.
Packer = Callable[[int, int, torch.Generator], tuple[dict[str, Tensor], Tensor]]


def draw(low: int, high: int, *shape: int, generator: torch.Generator) -> Tensor:
    """Integers of low..high."""
    return torch.randint(low, high + 1, shape, generator=generator)


def scales_of(*shape: int, generator: torch.Generator, step: float) -> Tensor:
    """float32 scales around `step`."""
    return step * (0.5 + torch.rand(shape, generator=generator))


def gptq(bits: int, group_size: int, *, symmetric: bool = True, offset: int = 1) -> Packer:
    """`offset`: what is added to a stored zero point; 1 for the first version."""

    def pack(rows: int, width: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        size = width if group_size == -1 else group_size
        groups, top = width // size, 2**bits - 1
        codes = draw(0, top, width, rows, generator=generator)
        zeros = draw(offset, top, groups, rows, generator=generator)
        zeros = torch.full_like(zeros, 2 ** (bits - 1)) if symmetric else zeros
        scales = scales_of(groups, rows, generator=generator, step=0.5 / 2**bits).half()
        group = torch.arange(width) // size
        tensors = {
            "qweight": packed(codes, bits, 0),
            "qzeros": packed(zeros - offset, bits, 1),
            "scales": scales,
            "g_idx": group.int(),
        }
        return tensors, ((codes - zeros[group]).float() * scales[group].float()).T

    return pack


def gptq_act_order(
    rows: int, width: int, generator: torch.Generator
) -> tuple[dict[str, Tensor], Tensor]:
    """Groups of 32, scattered over the row."""
    codes = draw(0, 15, width, rows, generator=generator)
    scales = scales_of(width // 32, rows, generator=generator, step=0.03).half()
    group = (torch.arange(width) // 32)[torch.randperm(width, generator=generator)]
    tensors = {
        "qweight": packed(codes, 4, 0),
        "qzeros": packed(torch.full((width // 32, rows), 7), 4, 1),
        "scales": scales,
        "g_idx": group.int(),
    }
    return tensors, ((codes - 8).float() * scales[group].float()).T


def awq(rows: int, width: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    """Groups of 32."""
    codes = draw(0, 15, width, rows, generator=generator)
    zeros = draw(0, 15, width // 32, rows, generator=generator)
    scales = scales_of(width // 32, rows, generator=generator, step=0.03).half()
    order = torch.tensor(AWQ_COLUMNS)
    qweight, qzeros = (
        packed(part.unflatten(1, (-1, 8))[..., order].flatten(1), 4, 1) for part in (codes, zeros)
    )
    group = torch.arange(width) // 32
    tensors = {"qweight": qweight, "qzeros": qzeros, "scales": scales}
    return tensors, ((codes - zeros[group]).float() * scales[group].float()).T


def pack_quantized(bits: int, group_size: int, *, symmetric: bool = True) -> Packer:
    """compressed-tensors; a group of -1 is a row."""

    def pack(rows: int, width: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        size, middle = width if group_size == -1 else group_size, 2 ** (bits - 1)
        codes = draw(-middle, middle - 1, rows, width, generator=generator)
        zeros = draw(-middle, middle - 1, rows, width // size, generator=generator) * (
            not symmetric
        )
        scales = scales_of(rows, width // size, generator=generator, step=0.5 / 2**bits).bfloat16()
        tensors = {
            "weight_packed": packed(codes + middle, bits, 1),
            "weight_scale": scales,
            "weight_shape": torch.tensor([rows, width]),
        }
        if not symmetric:
            tensors["weight_zero_point"] = packed(zeros + middle, bits, 0)
        group = torch.arange(width) // size
        return tensors, (codes - zeros[:, group]).float() * scales.float()[:, group]

    return pack


def int_quantized(
    rows: int, width: int, generator: torch.Generator
) -> tuple[dict[str, Tensor], Tensor]:
    """compressed-tensors, a scale for each row."""
    codes = draw(-128, 127, rows, width, generator=generator)
    scales = scales_of(rows, 1, generator=generator, step=0.002)
    return {"weight": codes.to(torch.int8), "weight_scale": scales}, codes.float() * scales


def bnb_int8(rows: int, width: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    """bitsandbytes, rows in their order."""
    codes = draw(-127, 127, rows, width, generator=generator)
    scales = scales_of(rows, generator=generator, step=0.25)
    tensors = {
        "weight": codes.to(torch.int8),
        "SCB": scales,
        "weight_format": torch.tensor(0, dtype=torch.uint8),
    }
    return tensors, codes.float() * (scales / 127)[:, None]


def bnb_4bit(levels: str, *, nested: bool = False) -> Packer:
    """bitsandbytes in blocks of 64; `levels` is nf4 or fp4."""

    def pack(rows: int, width: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        codes = draw(0, 15, rows * width, generator=generator)
        table = torch.linspace(-1, 1, 16) ** 3
        blocks = rows * width // 64
        state = {"blocksize": 64, "shape": [rows, width], "dtype": "bfloat16"}
        absmax = scales_of(blocks, generator=generator, step=0.3)
        tensors = {
            "weight": (codes[0::2] * 16 + codes[1::2]).to(torch.uint8)[:, None],
            "weight.quant_map": table,
            "weight.absmax": absmax,
        }
        if nested:
            state |= {"nested_blocksize": 256, "nested_offset": 0.25}
            inner = draw(0, 255, blocks, generator=generator)
            outer = scales_of(-(-blocks // 256), generator=generator, step=0.1)
            tensors["weight.absmax"] = inner.to(torch.uint8)
            tensors["weight.nested_quant_map"] = torch.linspace(-1, 1, 256)
            tensors["weight.nested_absmax"] = outer
            absmax = torch.linspace(-1, 1, 256)[inner] * outer[torch.arange(blocks) // 256] + 0.25
        text = list(json.dumps(state).encode())
        tensors[f"weight.quant_state.bitsandbytes__{levels}"] = torch.tensor(
            text, dtype=torch.uint8
        )
        return tensors, (table[codes] * absmax.repeat_interleave(64)).view(rows, width)

    return pack


def float8(scales: str, name: str = "weight_scale") -> Packer:
    """float8_e4m3fn with scales for the "tensor", each "row", or a "block" of 128 x 128."""

    def pack(rows: int, width: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        weight = torch.randn((rows, width), generator=generator).to(torch.float8_e4m3fn)
        blocks = -(-rows // 128), -(-width // 128)
        shape = {"tensor": (1,), "row": (rows, 1), "block": blocks}[scales]
        factors = scales_of(*shape, generator=generator, step=0.1)
        spread = factors
        if scales == "block":
            spread = factors.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :width]
        return {"weight": weight, name: factors}, weight.float() * spread

    return pack


def write_pair(
    path: Path,
    packer: Packer,
    settings: dict[str, Any],
    *,
    family: Any = "llama",
    is_packed: Callable[[str], bool] = lambda layer: layer.endswith("_proj"),
    **overrides: Any,
) -> tuple[Path, Path]:
    """Write a quantised checkpoint, and one with the same matrices in float32.

    Args:
        settings: its `quantization_config`.
        is_packed: whether a linear layer is quantised, by its name.
    """
    wide = write_tiny_checkpoint(path / "wide", family, **SIZES | overrides)
    narrow = write_tiny_checkpoint(path / "packed", family, **SIZES | overrides)
    tensors = load_file(wide / "model.safetensors")
    stored, generator = dict(tensors), torch.Generator().manual_seed(0)
    for name, tensor in tensors.items():
        layer = name.removesuffix(".weight")
        if tensor.ndim == 2 and is_packed(layer):
            parts, matrix = packer(tensor.shape[0], tensor.shape[1], generator)
            tensors[name] = matrix.contiguous()
            del stored[name]
            stored |= {f"{layer}.{suffix}": part.contiguous() for suffix, part in parts.items()}
    save_file(tensors, wide / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, narrow / "model.safetensors", metadata={"format": "pt"})
    edit_config(narrow, quantization_config=settings)
    return narrow, wide


def edit_config(path: Path, **changes: Any) -> None:
    """Change entries of a checkpoint's config.json; None removes one."""
    config = json.loads((path / "config.json").read_text()) | changes
    config = {name: value for name, value in config.items() if value is not None}
    (path / "config.json").write_text(json.dumps(config))


def edit_tensors(path: Path, changes: Mapping[str, Tensor | None]) -> None:
    """Change tensors of a checkpoint; None removes one."""
    tensors: dict[str, Tensor | None] = {**load_file(path / "model.safetensors"), **changes}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, path / "model.safetensors", metadata={"format": "pt"})
