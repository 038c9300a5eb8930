"""Whether this process multiplies weights in bfloat16 by tiles; for the host, no kernel imports it."""

from __future__ import annotations

import functools
import os

from ramify.errors import ConfigError
from ramify.kernels.cpu.abi import BF16_TILES, BF16_TILES_EMULATED
from ramify.kernels.cpu.targets import has_tiles

# "off": bfloat16 without tiles, "emulated": with the arithmetic of tiles on any machine.
TILES_VARIABLE = "RAMIFY_BF16_TILES"


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
