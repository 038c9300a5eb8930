"""The requests of a log with each text stored once, on disk where it is large."""

from __future__ import annotations

import copy
import os
import tempfile
import weakref
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import IO, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from ramify.analysis.records import LoggedRequest, Segment, SegmentKind, TextForm
from ramify.analysis.tokens import (
    EstimatingTokenizer,
    PrefixHasher,
    Tokenizer,
    Tokens,
    common_len,
    spread_ids,
)

T = TypeVar("T")

MEMORY_BYTES = 256 << 20  # of texts and token arrays that are kept beside the file
RECENT_BYTES = 400  # of a segment beside its text


@dataclass(frozen=True, slots=True)
class Unit:
    """What segments with the same content have in common, in all requests."""

    kind: SegmentKind
    form: TextForm
    label: str
    num_chars: int
    num_tokens: int  # a token for the label included, if there is one
    offset: int  # of the text in the file
    num_bytes: int

    @property
    def head(self) -> tuple[SegmentKind, TextForm, str]:
        """What has to be equal before two texts are compared."""
        return self.kind, self.form, self.label


@dataclass(frozen=True, slots=True)
class StoredRequest:
    """A request of a corpus; `info` is the logged request without its segments."""

    number: int  # in the corpus, in order of reading
    info: LoggedRequest
    units: NDArray[np.uint32]  # [segments] numbers of units
    paths: tuple[str, ...]  # [segments]
    breakpoints: tuple[tuple[int, float], ...] = ()  # segment, lifetime asked for in seconds

    order_s: float = float("-inf")  # start, or that of the nearest line before with one

    def start_key(self) -> tuple[float, int]:
        """Sorts by start where it is logged, else by line."""
        return (self.order_s, self.number)


class Corpus:
    """Stores requests; texts are found by unit.

    Memory grows by the number of segments of all requests (12 bytes each) and of different segments
    (about 300 bytes each); texts go to an anonymous file.
    """

    def __init__(
        self, tokenizer: Tokenizer | None = None, *, memory_bytes: int = MEMORY_BYTES
    ) -> None:
        self.tokenizer = EstimatingTokenizer() if tokenizer is None else tokenizer
        self.hasher = PrefixHasher()
        self.requests: list[StoredRequest] = []
        self.units: list[Unit] = []
        self._unit_of: dict[bytes, int] = {}
        self._path_of: dict[str, str] = {}
        self._lengths = array("q")  # tokens of each unit
        self._keys = np.zeros(0, np.uint64)  # hash of each unit's number
        self._file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the corpus
        weakref.finalize(self, self._file.close)
        # The corpus a subset came from: its finaliser closes the file.
        self._whole: Corpus | None = None
        self._texts: _ByteLru[str] = _ByteLru(memory_bytes * 3 // 8)
        self._tokens: _ByteLru[Tokens] = _ByteLru(memory_bytes // 2)
        # By id(segment); holding the segment keeps the id from reuse.
        self._recent: dict[int, tuple[Segment, int]] = {}
        self._recent_bytes, self._max_recent_bytes = 0, memory_bytes // 8

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[StoredRequest]:
        return iter(self.requests)

    def add(self, request: LoggedRequest) -> StoredRequest:
        """Store a request."""
        segments, order_s = request.segments, request.start_s
        if order_s is None:
            order_s = self.requests[-1].order_s if self.requests else float("-inf")
        stored = StoredRequest(
            number=len(self.requests),
            info=replace(request, segments=()),
            units=np.fromiter(map(self.unit_of, segments), np.uint32, len(segments)),
            paths=tuple(self._path_of.setdefault(item.path, item.path) for item in segments),
            breakpoints=tuple(
                (number, item.breakpoint_ttl_s)
                for number, item in enumerate(segments)
                if item.breakpoint_ttl_s is not None
            ),
            order_s=order_s,
        )
        self.requests.append(stored)
        return stored

    def subset(self, requests: Iterable[StoredRequest]) -> Corpus:
        """A corpus of some of its requests, numbered anew; both have the same units."""
        other = copy.copy(self)
        part = [replace(item, number=number) for number, item in enumerate(requests)]
        vars(other).update(requests=part, _whole=self)
        return other

    def unit_of(self, segment: Segment) -> int:
        """Number of the unit with a segment's content, which is added if it is new."""
        # Readers of transcripts share the segments of a history between its requests.
        known = self._recent.get(id(segment))
        if known is not None and known[0] is segment:
            return known[1]
        number = self._unit_with_text_of(segment)
        self._recent_bytes += RECENT_BYTES + len(segment.text)
        if self._recent_bytes > self._max_recent_bytes:
            self._recent.clear()
            self._recent_bytes = RECENT_BYTES + len(segment.text)
        self._recent[id(segment)] = (segment, number)
        return number

    def unit_like(self, unit: int, text: str) -> int:
        """Number of the unit that has the head of another unit and this text."""
        kind, form, label = self.units[unit].head
        return self.unit_of(Segment("", kind, text, form, label))

    def _unit_with_text_of(self, segment: Segment) -> int:
        text = segment.text.encode("utf-8", "surrogatepass")
        head = f"{segment.kind} {segment.form} {len(segment.label)} {segment.label} ".encode(
            "utf-8", "surrogatepass"
        )
        digest = blake2b(head + text, digest_size=16).digest()
        number = self._unit_of.get(digest)
        if number is None:
            number = len(self.units)
            tokens = self._encode(segment.text, segment.form, segment.label)
            offset = self._file.seek(0, os.SEEK_END)
            self._file.write(text)
            # Ctrl-C may have left the length of a unit that was not added.
            self._lengths[number:] = array("q", [len(tokens)])
            self.units.append(
                Unit(
                    kind=segment.kind,
                    form=segment.form,
                    label=segment.label,
                    num_chars=len(segment.text),
                    num_tokens=len(tokens),
                    offset=offset,
                    num_bytes=len(text),
                )
            )
            self._unit_of[digest] = number  # last: Ctrl-C leaves no number without its unit
            self._texts.put(number, segment.text, len(text))
            self._tokens.put(number, tokens, tokens.nbytes)
        return number

    def text(self, unit: int) -> str:
        """Text of a unit."""
        text = self._texts.get(unit)
        if text is None:
            stored = self.units[unit]
            self._file.seek(stored.offset)
            text = self._file.read(stored.num_bytes).decode("utf-8", "surrogatepass")
            self._texts.put(unit, text, stored.num_bytes)
        return text

    def tokens(self, unit: int) -> Tokens:
        """[num_tokens] of a unit, the label's token first."""
        tokens = self._tokens.get(unit)
        if tokens is None:
            stored = self.units[unit]
            tokens = self._encode(self.text(unit), stored.form, stored.label)
            self._tokens.put(unit, tokens, tokens.nbytes)
        return tokens

    def lengths_of(self, units: NDArray[np.uint32]) -> NDArray[np.int64]:
        """[units] tokens of each."""
        return np.frombuffer(self._lengths, np.int64)[units]

    def keys_of(self, units: NDArray[np.uint32]) -> Tokens:
        """[units] a well distributed hash of each."""
        if len(self._keys) < len(self.units):
            self._keys = spread_ids(np.arange(2 * len(self.units)))
        return self._keys[units]

    def shared_tokens(self, a: int, b: int) -> int:
        """Tokens that two units begin with; 0 for other kinds, forms or labels, and for other media."""
        left, right = self.units[a], self.units[b]
        if left.head != right.head or left.form is TextForm.MEDIA:
            return 0  # digests of other media share nothing
        return common_len(self.tokens(a), self.tokens(b))

    def num_tokens(self, request: StoredRequest) -> int:
        """Tokens of a request's prompt, without settings."""
        if request.info.hashed is not None:
            return request.info.hashed.num_tokens
        stored = (self.units[unit] for unit in request.units.tolist())
        return sum(unit.num_tokens for unit in stored if unit.kind is not SegmentKind.SETTING)

    @property
    def has_token_ids(self) -> bool:
        """Whether all content is token ids of the log, so that no tokenizer counts anything."""
        return all(
            unit.form is TextForm.TOKENS or unit.kind is SegmentKind.SETTING for unit in self.units
        )

    @property
    def is_exact(self) -> bool:
        """Whether token counts are exact, not estimates."""
        return self.has_token_ids or self.tokenizer.is_exact

    def _encode(self, text: str, form: TextForm, label: str) -> Tokens:
        if form is TextForm.TOKENS:
            tokens = spread_ids(np.array(text.split(), np.int64))
        else:
            tokens = self.tokenizer.encode(text)
        if not label:
            return tokens
        head = np.array([hash((form, label))], np.int64).view(np.uint64)
        return np.concatenate([head, tokens])


class _ByteLru(Generic[T]):
    """Values by number, the least recently used dropped over a number of bytes."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._values: OrderedDict[int, tuple[T, int]] = OrderedDict()

    def get(self, number: int) -> T | None:
        entry = self._values.get(number)
        if entry is None:
            return None
        self._values.move_to_end(number)
        return entry[0]

    def put(self, number: int, value: T, num_bytes: int) -> None:
        self._values[number] = (value, num_bytes)
        self._num_bytes += num_bytes
        while self._num_bytes > self._max_bytes and len(self._values) > 1:
            _, (_, dropped) = self._values.popitem(last=False)
            self._num_bytes -= dropped
