"""`simulate(...)`: what `ramify simulate` does, as a call."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ramify.analysis.formats.mooncake import MooncakeReader
from ramify.analysis.reading import ReadQuality, Row
from ramify.analysis.records import LoggedRequest
from ramify.analysis.simulation.capacities import (
    DEFAULT_CAPACITIES,
    DEFAULT_LIFETIMES_S,
    parse_capacity,
    parse_lifetime,
)
from ramify.analysis.simulation.results import Simulation
from ramify.analysis.simulation.run import Progress, SimulationOptions, simulate_trace
from ramify.analysis.simulation.sources import page_trace
from ramify.analysis.tokens import Tokenizer
from ramify.errors import LogError

Log = str | Path | Iterable[str | Path] | Iterable[LoggedRequest]


def simulate(
    log: Log,
    *,
    capacity: str | int | Iterable[str | int] = DEFAULT_CAPACITIES,
    policy: str | Iterable[str] = ("lru", "auto"),
    ttl: str | float | Iterable[str | float] = DEFAULT_LIFETIMES_S,
    page_size: int | None = None,
    insert_outputs: bool = False,
    warm_up: float = 0.0,
    tokenizer: Tokenizer | None = None,
    token_bytes: int | None = None,
    progress: Progress | None = None,
) -> Simulation:
    """Hit rates of a log by capacity, policy and lifetime.

    Args:
        log: files, or requests that were read before.
        capacity: tokens, or `5M`, or with `token_bytes` `24GB`; a list, or text with commas.
        policy: names of eviction policies; see `ramify.cache.POLICIES`.
        ttl: seconds, or `5m`; needs a log with times.
        page_size: tokens; None: the blocks of a hashed trace, 16 for texts.
        insert_outputs: cache answers too.
        warm_up: share of the requests that fill the cache and are not counted.
        tokenizer: of texts; None estimates.
        token_bytes: K/V bytes of a token, for capacities in bytes.
        progress: gets part, requests done and requests in all.

    Raises:
        LogError: the log cannot be read, or has no prompts.
        ConfigError: an option is not possible.
    """
    options = SimulationOptions(
        capacities=tuple(
            parse_capacity(item, token_bytes=token_bytes) for item in _items(capacity)
        ),
        policies=tuple(_items(policy)),
        lifetimes_s=tuple(parse_lifetime(item) for item in _items(ttl)),
        warm_up=warm_up,
    )
    source = page_trace(
        requests_of(log), page_size=page_size, insert_outputs=insert_outputs, tokenizer=tokenizer
    )
    return simulate_trace(source, options, insert_outputs=insert_outputs, progress=progress)


def requests_of(log: Log) -> Iterator[LoggedRequest]:
    """Requests of files, or those that are given.

    Raises:
        LogError: a file cannot be read.
    """
    for item in [log] if isinstance(log, str | Path) else log:
        if isinstance(item, LoggedRequest):
            yield item
        else:
            yield from _read_mooncake(Path(item))


def _read_mooncake(path: Path) -> Iterator[LoggedRequest]:
    reader = MooncakeReader(ReadQuality())
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                yield from reader.feed(Row(str(path), number, json.loads(line)))
    except (OSError, ValueError) as error:
        raise LogError(f"{path} cannot be read: {error}") from error


def _items(value: Any) -> list[Any]:
    """A list as it is, text with commas as its parts, else a list of one."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return list(value) if isinstance(value, Iterable) else [value]
