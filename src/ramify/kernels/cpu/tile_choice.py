"""What this process multiplies bfloat16 with; for the host, no kernel imports it."""

from __future__ import annotations

import functools
import os

from ramify.errors import ConfigError
from ramify.kernels.cpu.abi import BF16, BF16_TILES, BF16_TILES_EMULATED, BF16_VNNI
from ramify.kernels.cpu.targets import (
    has_avx512,
    has_bf16_dot,
    has_fast_bf16_dot,
    has_tiles,
)

# "off": bfloat16 without tiles, "emulated": with the arithmetic of tiles on any machine.
TILES_VARIABLE = "RAMIFY_BF16_TILES"
_NAMES = {BF16: "fma", BF16_VNNI: "dot", BF16_TILES: "tiles", BF16_TILES_EMULATED: "tiles"}


@functools.cache
def bf16_tile_kind() -> int | None:
    """The kind of weights in bfloat16 if this process multiplies all of them by tiles, else None.

    Raises:
        ConfigError: `TILES_VARIABLE` is neither "off" nor "emulated".
    """
    setting = os.environ.get(TILES_VARIABLE, "")
    if setting not in ("", "off", "emulated"):
        raise ConfigError(f'{TILES_VARIABLE}={setting}; use "off", "emulated", or leave it out')
    if setting:
        return BF16_TILES_EMULATED if setting == "emulated" else None
    return BF16_TILES if has_tiles() else None


def bf16_weight_kind(width: int) -> int:
    """The kind of a weight [n, width] in bfloat16 that is packed in this process.

    Tiles, else dot products where they are faster than FMA on widened elements and `width` is even.

    Raises:
        ConfigError: see `bf16_tile_kind`.
    """
    tiles = bf16_tile_kind()
    if tiles is not None:
        return tiles
    return BF16_VNNI if has_fast_bf16_dot() and width % 2 == 0 else BF16


def kernel_arithmetic() -> str:
    """What the bits of kernels depend on beside the machine: Numba's configuration, the system, `TILES_VARIABLE`.

    Weights in bfloat16 are multiplied by "fma", "dot" or "tiles"; sums go by lane of a vector;
    attention takes bfloat16 by dot products where kernels have them, or by tiles.
    """
    lanes = 16 if has_avx512() else 8
    dot = "with" if has_bf16_dot() else "without"
    return f"{lanes} lanes {dot} dot products, bfloat16 by {_NAMES[bf16_weight_kind(2)]}"
