"""A log as an anonymous Mooncake trace, which others can replay: lengths, times, equal prefixes.

Ids of blocks are numbered in order of appearance; equal ids mean equal prefixes, as far as the log
shows them. Times are milliseconds from the first request. Texts, names, models and conversations are
left out, and nothing in the file is derived from them but equality.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TextIO

import numpy as np

from ramify.analysis.corpus import Corpus, StoredRequest
from ramify.analysis.records import SegmentKind

BLOCK_SIZE = 512  # of the published traces
Key = tuple[object, ...]


def write_trace(corpus: Corpus, out: TextIO) -> int:
    """Write a line for each request with a prompt, by start; returns how many."""
    numbers: dict[Key, int] = {}
    ordered = sorted(corpus, key=StoredRequest.start_key)
    starts = [item.info.start_s for item in ordered if item.info.start_s is not None]
    first_s = min(starts, default=0.0)
    num = 0
    for request in ordered:
        num_tokens = corpus.num_tokens(request)
        if not num_tokens:
            continue
        row: dict[str, object] = {}
        if request.info.start_s is not None:
            row["timestamp"] = round(1000 * (request.info.start_s - first_s))
        elif not starts:
            row["timestamp"] = 0
        row["input_length"] = num_tokens
        row["output_length"] = request.info.usage.num_output or 0
        row["hash_ids"] = [
            numbers.setdefault(key, len(numbers)) for key in _block_keys(corpus, request)
        ]
        if request.info.hashed is not None and request.info.hashed.block_size != BLOCK_SIZE:
            row["block_size"] = request.info.hashed.block_size
        out.write(json.dumps(row, separators=(",", ":")) + "\n")
        num += 1
    return num


def _block_keys(corpus: Corpus, request: StoredRequest) -> Iterator[Key]:
    """A key for each block: that of the whole prefix up to its end; the last may be partial."""
    info = request.info
    if info.hashed is not None:
        for block in info.hashed.block_ids:
            yield (info.cache_scope, info.model, info.hashed.block_size, block)
        return
    units = request.units.tolist()
    settings = tuple(unit for unit in units if corpus.units[unit].kind is SegmentKind.SETTING)
    tokens = [corpus.tokens(unit) for unit in units if unit not in settings]
    hashes = corpus.hasher.prefix_hashes(np.concatenate(tokens))
    for end in range(BLOCK_SIZE, len(hashes) - 1 + BLOCK_SIZE, BLOCK_SIZE):
        at = min(end, len(hashes) - 1)
        yield (info.cache_scope, settings, at, int(hashes[at]))
