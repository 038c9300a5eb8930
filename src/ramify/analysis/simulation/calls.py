"""`simulate(...)`: what `ramify simulate` does, as a call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

from ramify.analysis.corpus import Corpus
from ramify.analysis.log_files import read_log
from ramify.analysis.progress import Progress
from ramify.analysis.reader import ReadQuality
from ramify.analysis.records import LoggedRequest
from ramify.analysis.simulation.capacities import (
    DEFAULT_LIFETIMES_S,
    parse_capacity,
    parse_lifetime,
)
from ramify.analysis.simulation.kv_bytes import kv_token_bytes
from ramify.analysis.simulation.results import Simulation
from ramify.analysis.simulation.run import SimulationOptions, simulate_trace
from ramify.analysis.simulation.sources import corpus_trace, page_trace
from ramify.analysis.tokens import Tokenizer
from ramify.errors import LogError
from ramify.step_cost import CostModel

Files = str | PathLike[str] | Iterable[str | PathLike[str]]
Log = Corpus | Files | Iterable[LoggedRequest]


def simulate(
    log: Log,
    *,
    capacity: str | int | Iterable[str | int] | None = None,
    policy: str | Iterable[str] = ("lru", "auto"),
    ttl: str | float | Iterable[str | float] = DEFAULT_LIFETIMES_S,
    page_size: int | None = None,
    insert_outputs: bool = False,
    warm_up: float = 0.0,
    end_sessions: str | float | None = None,
    cost: CostModel | str | PathLike[str] | None = None,
    max_num_seqs: int = 64,
    max_batch_tokens: int = 512,
    model: str | None = None,
    tokenizer: Tokenizer | None = None,
    format: str | None = None,  # noqa: A002 - the word of the command line
    strict: bool = False,
    progress: Progress | None = None,
) -> Simulation:
    """Hit rates of a log by capacity, policy and lifetime.

    Args:
        log: files, a corpus, or requests that were read before.
        capacity: tokens, or `5M`, or with `model` `24GB`; a list, or text with commas. None: four, up to
            that at which the hit rate of LRU stops rising.
        policy: names of eviction policies; see `ramify.cache.POLICIES`.
        ttl: seconds, or `5m`; needs a log with times.
        page_size: tokens; None: the blocks of a hashed trace, 16 for texts.
        insert_outputs: cache answers too, as soon as a request arrives.
        warm_up: share of the requests that fill the cache and are not counted.
        end_sessions: seconds, or `5m`: replay again with each session ended this long after its last
            request. Sessions that the log does not name are inferred from prefixes.
        cost: of steps, or the file that `ramify calibrate` wrote; replays the real engine, whose
            size is `max_num_seqs` and `max_batch_tokens`.
        model: checkpoint directory, config.json or built-in model, for capacities in bytes.
        tokenizer: of texts; None estimates.
        format, strict: see `read_log`.
        progress: gets part, requests done and requests in all.

    Raises:
        LogError: the log cannot be read, or has no prompts.
        ConfigError: an option is not possible.
        ModelError: the model's configuration cannot be used.
    """
    token_bytes = None if model is None else kv_token_bytes(model)
    options = SimulationOptions(
        capacities=None
        if capacity is None
        else tuple(parse_capacity(item, token_bytes=token_bytes) for item in _items(capacity)),
        policies=tuple(_items(policy)),
        lifetimes_s=tuple(parse_lifetime(item) for item in _items(ttl)),
        warm_up=warm_up,
        end_sessions_s=None
        if end_sessions is None
        else parse_lifetime(end_sessions, "end_sessions"),
        cost=cost if cost is None or isinstance(cost, CostModel) else CostModel.load(Path(cost)),
        max_num_seqs=max_num_seqs,
        max_batch_tokens=max_batch_tokens,
    )
    quality = ReadQuality()
    if isinstance(log, Corpus):
        source = corpus_trace(log, page_size=page_size, insert_outputs=insert_outputs)
    else:
        requests = _requests_of(log, format, quality, strict=strict, progress=progress)
        source = page_trace(
            requests, page_size=page_size, insert_outputs=insert_outputs, tokenizer=tokenizer
        )
    result = simulate_trace(source, options, insert_outputs=insert_outputs, progress=progress)
    extra = dict(result.extra) | {"quality": quality.as_json()}
    if token_bytes is not None:
        extra["kv"] = {
            "model": model,
            "token_bytes": token_bytes,
            "gigabytes": {str(size): size * token_bytes / 1e9 for size in result.one_pass_lru},
        }
    return replace(result, extra=extra)


def _requests_of(
    log: Files | Iterable[LoggedRequest],
    format: str | None,  # noqa: A002
    quality: ReadQuality,
    *,
    strict: bool,
    progress: Progress | None,
) -> Iterator[LoggedRequest]:
    """Requests of files, or those that are given."""

    def advance(done: int, total: int | None) -> None:
        if progress is not None:
            progress("reading", done, total or done)

    paths: list[str | PathLike[str]] = []
    for item in [log] if isinstance(log, str | PathLike) else log:
        if isinstance(item, LoggedRequest):
            yield item
        else:
            paths.append(item)  # read together: a batch and its results are two files
    if paths:
        yield from read_log(paths, format=format, quality=quality, strict=strict, progress=advance)
        if not quality.num_requests:
            raise LogError(f"the log has no requests: {quality.why_empty()}")


def _items(value: Any) -> list[Any]:
    """A list as it is, text with commas as its parts, else a list of one."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return list(value) if isinstance(value, Iterable) else [value]
