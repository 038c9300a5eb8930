"""Cache events as msgpack, in the form of vLLM's `KVEventBatch`.

A batch is an array: time, events, rank. An event is a map with its kind under `type`, as vLLM writes it
from version 0.24 on, or an array that begins with its kind, as SGLang and older vLLM do. A block is a
page; its hash is the last 8 bytes of the page's hash, as an unsigned integer.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any

import msgspec

from ramify.cache.events import CacheEvent
from ramify.cache.key import HASH_BYTES

RANK = 0  # of one engine
# What readers call the pool, whatever it is made of, and the tiers: the first two as vLLM, which has
# no others, the last two as SGLang.
MEDIUMS = {"": "GPU", "host": "CPU", "disk": "DISK", "remote": "EXTERNAL"}


class EventForm(str, Enum):
    """How an event is written."""

    map = "map"
    array = "array"


class BatchEncoder:
    """Encodes batches of events. For one thread.

    Args:
        page_size: tokens of a page, which is a block.
    """

    def __init__(self, form: EventForm, page_size: int) -> None:
        self._write_map, self._page_size = form is EventForm.map, page_size
        self._encode = msgspec.msgpack.Encoder().encode

    def batch(self, now_s: float, events: Iterable[CacheEvent]) -> bytes | None:
        """The batch of these events; None if there is nothing to publish, as for splits."""
        written = [self._event(event) for event in events if event.kind != "split"]
        return self._encode((now_s, written, RANK)) if written else None

    def cleared(self, now_s: float) -> bytes:
        """A batch that forgets every block."""
        return self._encode((now_s, [self._written("AllBlocksCleared")], RANK))

    def _event(self, event: CacheEvent) -> Any:
        match event.kind:
            case "stored":
                return self._written(
                    "BlockStored",
                    block_hashes=block_hashes(event.hashes),
                    parent_block_hash=block_hashes(event.parent_hash)[0] if event.start else None,
                    token_ids=token_ids(event.atoms),
                    block_size=self._page_size,
                    lora_id=None,
                    medium=MEDIUMS[event.tier],
                    lora_name=None,
                )
            case "removed":
                return self._written(
                    "BlockRemoved",
                    block_hashes=block_hashes(event.hashes),
                    medium=MEDIUMS[event.tier],
                )
            case _:
                return self._written("AllBlocksCleared")

    def _written(self, kind: str, **fields: Any) -> Any:
        if self._write_map:
            return {"type": kind, **fields}
        return [kind, *fields.values()]


def block_hashes(packed: bytes) -> Sequence[int]:
    """The last 8 bytes of each packed page hash, big-endian."""
    return [
        int.from_bytes(packed[end - 8 : end], "big")
        for end in range(HASH_BYTES, len(packed) + 1, HASH_BYTES)
    ]


def token_ids(atoms: bytes) -> list[int]:
    """The atoms as token ids; what stands for media or a salt is 0."""
    return [max(0, atom) for atom in array("i", atoms)]
