"""The tree of shared prefixes for the icicle: its widest nodes, with hit share and causes."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ramify.analysis.compare.quoting import mask_secrets, shorten
from ramify.analysis.corpus import Corpus, StoredRequest
from ramify.analysis.records import SegmentKind
from ramify.analysis.report.document import PrefixNode
from ramify.analysis.report.figures.reads import Counts, RequestReads
from ramify.analysis.verdicts import CauseName, Verdict
from ramify.counts import counted

MAX_NODES = 1500
# Narrower siblings are merged: nobody sees them, zoomed in to their parent or not.
MIN_SHARE = 0.0003  # of all tokens
MIN_SHARE_OF_PARENT = 0.001  # about a pixel
MAX_CHILDREN = 400
MAX_TEXT = 100
_CAUSES = tuple(CauseName)
_HASHED = -1


@dataclass(slots=True)
class _Group:
    """Requests that share the first `start` elements of their prompts."""

    requests: NDArray[np.int64]
    start: int
    offset: int  # tokens before
    parent: int
    depth: int


class PrefixTreeBuilder:
    """Splits requests by their segments (or hashed blocks), the widest groups first."""

    def __init__(self, corpus: Corpus, reads: RequestReads, verdicts: Sequence[Verdict]) -> None:
        self._corpus, self._reads = corpus, reads
        self._cause_of = np.array(
            [
                _CAUSES.index(verdict.causes[0].cause) if verdict.causes else -1
                for verdict in verdicts
            ],
            np.int64,
        )
        self._nodes: list[PrefixNode] = []
        self._queue: list[tuple[int, int, _Group]] = []  # heap, the widest first
        self._total = 0
        self._scopes: dict[tuple[object, ...], int] = {}
        rows, sizes = [], []
        for request in corpus:
            row, size = self._elements(request)
            rows.append(row)
            sizes.append(size)
        self._lengths = np.array([len(row) for row in rows], np.int64)
        self._starts = np.concatenate([[0], np.cumsum(self._lengths)])[:-1].astype(np.int64)
        empty = np.zeros(0, np.int64)
        self._flat = np.concatenate([empty, *rows])
        self._sizes = np.concatenate([empty, *sizes])

    def build(self) -> tuple[PrefixNode, ...]:
        """Nodes, parents before children; the first is the root."""
        everyone = np.flatnonzero(self._lengths)
        if not len(everyone):
            return ()
        self._total = int(self._reads.num_tokens[everyone].sum())
        self._nodes = [
            PrefixNode(-1, "all requests", "", 0, 0, len(everyone), 0, 0, self._total, 0)
        ]
        self._split(_Group(everyone, 0, 0, 0, 1))
        while self._queue and len(self._nodes) < MAX_NODES:
            _, _, group = heapq.heappop(self._queue)
            self._expand(group)
        while self._queue:
            self._merge([heapq.heappop(self._queue)[2]])
        return tuple(self._nodes)

    def _elements(self, request: StoredRequest) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        hashed = request.info.hashed
        scope = (request.info.cache_scope, request.info.model if hashed else None)
        number = self._scopes.setdefault(scope, len(self._scopes))
        if hashed is not None:
            row = np.array(hashed.block_ids, np.int64)
            size = np.full(len(row), hashed.block_size, np.int64)
            if len(size):
                size[-1] = max(0, hashed.num_tokens - hashed.block_size * (len(size) - 1))
        else:
            row = request.units.astype(np.int64)
            units = [self._corpus.units[unit] for unit in row.tolist()]
            # Settings split the cache and are no tokens of the prompt.
            size = np.array(
                [unit.num_tokens * (unit.kind is not SegmentKind.SETTING) for unit in units],
                np.int64,
            )
        if len(row):
            row[0] ^= number << 40  # another scope shares nothing
        return row, size

    def _expand(self, group: _Group) -> None:
        """Draw what all requests of a group share next, then split the group."""
        end = self._shared_end(group)
        if end > group.start:
            node = self._add(group, end)
            width = self._nodes[node].num_tokens
            group = _Group(group.requests, end, group.offset + width, node, group.depth + 1)
        self._split(group)

    def _shared_end(self, group: _Group) -> int:
        requests, at = group.requests, group.start
        longest = int(self._lengths[requests].min())
        kind = self._kind(int(requests[0]), at)
        if len(requests) == 1:
            return longest
        while at < longest:
            elements = self._flat[self._starts[requests] + at]
            if (elements != elements[0]).any() or self._kind(int(requests[0]), at) != kind:
                break
            at += 1
        return at

    def _kind(self, request: int, at: int) -> int:
        """A number for tools, system or messages; a node holds one kind."""
        stored = self._corpus.requests[request]
        if stored.info.hashed is not None or at >= len(stored.units):
            return _HASHED
        return list(SegmentKind).index(self._corpus.units[int(stored.units[at])].kind)

    def _split(self, group: _Group) -> None:
        going_on = group.requests[self._lengths[group.requests] > group.start]
        if not len(going_on):
            return
        elements = self._flat[self._starts[going_on] + group.start]
        _, which = np.unique(elements, return_inverse=True)
        order = np.argsort(which, kind="stable")
        parts = np.split(going_on[order], np.flatnonzero(np.diff(which[order])) + 1)
        children = [
            _Group(part, group.start, group.offset, group.parent, group.depth) for part in parts
        ]
        widths = [self._width(child) for child in children]
        least = max(MIN_SHARE * self._total, MIN_SHARE_OF_PARENT * self._width(group))
        narrow: list[_Group] = []
        for rank, at in enumerate(np.argsort(widths, kind="stable")[::-1].tolist()):
            child = children[at]
            is_wide = widths[at] >= least and rank < MAX_CHILDREN
            if is_wide or len(children) == 1:
                heapq.heappush(self._queue, (-widths[at], int(child.requests[0]), child))
            else:
                narrow.append(child)
        if narrow:
            self._merge(narrow)

    def _width(self, group: _Group) -> int:
        return int((self._reads.num_tokens[group.requests] - group.offset).clip(min=0).sum())

    def _add(self, group: _Group, end: int) -> int:
        first = int(group.requests[0])
        place = int(self._starts[first])
        num_tokens = int(self._sizes[place + group.start : place + end].sum())
        low, high = group.offset, group.offset + num_tokens
        self._nodes.append(
            PrefixNode(
                parent=group.parent,
                label=self._label(first, group.start, end),
                text=self._text(first, group.start),
                depth=group.depth,
                first=first,
                num_requests=len(group.requests),
                num_tokens=num_tokens,
                prefix_tokens=high,
                total=self._width(group),
                num_read=_overlap(self._reads.num_read[group.requests], low, high),
                lost=self._lost(group.requests, low, high),
            )
        )
        return len(self._nodes) - 1

    def _merge(self, groups: Sequence[_Group]) -> None:
        """Draw siblings that are too narrow as one node."""
        requests = np.concatenate([group.requests for group in groups])
        low = groups[0].offset
        high = int(self._reads.num_tokens[requests].max())
        total = sum(map(self._width, groups))
        num = len(groups)
        self._nodes.append(
            PrefixNode(
                parent=groups[0].parent,
                label=counted(num, "small branch", "small branches"),
                text="",
                depth=groups[0].depth,
                first=int(requests.min()),
                num_requests=len(requests),
                num_tokens=0,
                prefix_tokens=low,
                total=total,
                num_read=_overlap(self._reads.num_read[requests], low, high),
                lost=self._lost(requests, low, high),
                num_merged=num,
            )
        )

    def _lost(self, requests: NDArray[np.int64], low: int, high: int) -> dict[CauseName, int]:
        start, size = self._reads.reusable[requests], self._reads.lost[requests]
        inside = np.minimum(start + size, high) - np.maximum(start, low)
        causes = self._cause_of[requests]
        is_lost = (inside > 0) & (causes >= 0)
        if not is_lost.any():
            return {}
        sums = np.bincount(causes[is_lost], weights=inside[is_lost])
        return {_CAUSES[at]: int(sums[at]) for at in np.flatnonzero(sums).tolist()}

    def _label(self, request: int, start: int, end: int) -> str:
        stored = self._corpus.requests[request]
        if stored.info.hashed is not None:
            return f"block {start}" if end == start + 1 else f"blocks {start}-{end - 1}"
        first, last = stored.paths[start], stored.paths[end - 1]
        if end == start + 1:
            return first
        if first.startswith("settings."):
            return "settings" if last.startswith("settings.") else f"settings … {last}"
        return f"{first} … {last}"

    def _text(self, request: int, start: int) -> str:
        stored = self._corpus.requests[request]
        if stored.info.hashed is not None:
            return ""
        text = self._corpus.text(int(stored.units[start]))[: 4 * MAX_TEXT]
        return shorten(mask_secrets(text), limit=MAX_TEXT)


def _overlap(num_read: Counts, low: int, high: int) -> int:
    return int((np.minimum(num_read, high) - low).clip(min=0).sum())
