"""Capacities and lifetimes as users write them: `5M` tokens, `24GB` of K/V, `10m`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import count

from ramify.errors import ConfigError

NUM_FITTED = 4  # capacities of a simulation that names none
DEFAULT_LIFETIMES_S = (60.0, 300.0, 600.0, 1800.0, 3600.0)

_TOKENS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9}
_BYTES = {
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_SECONDS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_NUMBER = re.compile(r"\s*(\d+(?:[._]\d+)*)\s*([a-zA-Z]*)\s*")


def parse_capacity(text: str | int, *, token_bytes: int | None = None) -> int:
    """A capacity in tokens: `1000000`, `1M`, `2.5M`, `500k`, or `24GB` and `24GiB` of K/V.

    Args:
        token_bytes: K/V bytes of a token, for capacities in bytes.

    Raises:
        ConfigError: it is no capacity, or in bytes without a model.
    """
    if isinstance(text, int):
        return text
    number, unit = _split(text, "capacity", "1000000, 1M, 500k or, with --model, 24GB")
    if unit in _TOKENS:
        return round(number * _TOKENS[unit])
    if unit in _BYTES:
        if token_bytes is None:
            raise ConfigError(
                f"capacity={text!r} is in bytes, and K/V bytes per token depend on the model; give "
                "--model, or the capacity in tokens"
            )
        return int(number * _BYTES[unit]) // token_bytes
    raise ConfigError(
        f"capacity={text!r} has the unknown unit {unit!r}; use 1M, 500k or, with --model, 24GB"
    )


def parse_lifetime(text: str | float, name: str = "ttl") -> float:
    """A time in seconds: `300`, `5m`, `1h`.

    Args:
        name: of the option, for errors.

    Raises:
        ConfigError: it is no duration.
    """
    if isinstance(text, int | float):
        return float(text)
    number, unit = _split(text, name, "300, 5m or 1h")
    if unit not in _SECONDS:
        raise ConfigError(f"{name}={text!r} has the unknown unit {unit!r}; use 300, 5m or 1h")
    return number * _SECONDS[unit]


def validate_capacities(capacities: Iterable[int], page_size: int) -> tuple[int, ...]:
    """Different capacities, smallest first.

    Raises:
        ConfigError: there is none, or one holds less than a page.
    """
    ordered = tuple(sorted(set(capacities)))
    if not ordered:
        raise ConfigError("no capacity given; use --capacity 1M,2M for instance")
    if ordered[0] < page_size:
        raise ConfigError(
            f"capacity={ordered[0]} tokens is less than a page of {page_size}; give at least "
            f"{page_size}, or a smaller page size if the log has texts"
        )
    return ordered


def fitted_capacities(
    num_tokens: int, page_size: int, num_sizes: int = NUM_FITTED
) -> tuple[int, ...]:
    """The first of 1, 2, 5, 10, 20, … that is at least `num_tokens`, and those below it.

    Args:
        num_tokens: capacity at which the hit rate stops rising.
        page_size: none of them is smaller; a page, if `num_tokens` is.
    """
    ladder = (factor * 10**exponent for exponent in count() for factor in (1, 2, 5))
    sizes = [next(ladder)]
    while sizes[-1] < max(num_tokens, page_size):
        sizes.append(next(ladder))
    return tuple(size for size in sizes[-num_sizes:] if size >= page_size)


def capacity_label(num_tokens: int) -> str:
    """`1M`, `2.5M`, `500k`, `512`."""
    for factor, unit in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if num_tokens >= factor:
            return f"{num_tokens / factor:.4g}{unit}"
    return str(num_tokens)


def _split(text: str, name: str, examples: str) -> tuple[float, str]:
    match = _NUMBER.fullmatch(text)
    number = match[1].replace("_", "") if match else ""
    if match is None or number.count(".") > 1:
        raise ConfigError(f"{name}={text!r} is not possible; use {examples}")
    return float(number), match[2].lower()
