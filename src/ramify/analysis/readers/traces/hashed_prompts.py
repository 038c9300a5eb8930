"""Prompts known by the ids of their blocks: block sizes, and ids that are valid in part of a file."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

from ramify.analysis.reader import BadRowError, ReadQuality
from ramify.analysis.readers.row_values import ids_of, list_of, quoted
from ramify.analysis.records import HashedPrompt

MAX_BLOCK_SIZE = 1 << 20
SIZES = (512, *(1 << power for power in range(13) if power != 9))  # the first that fits is taken


def block_ids_of(value: object, name: str = "hash_ids") -> tuple[int, ...]:
    """Integers as they are, of any size; strings as 63-bit hashes.

    Raises:
        BadRowError: neither all integers nor all strings.
    """
    ids = list_of(value, name)
    kinds = set(map(type, ids))
    if kinds == {str}:
        return tuple(map(_hash_of, ids))
    if kinds <= {int}:
        return tuple(ids)
    return ids_of(value, name)


def namespaced(ids: tuple[int, ...], namespace: str) -> tuple[int, ...]:
    """Ids that are equal only to equal ids of the same namespace."""
    salt = _hash_of(namespace)
    return tuple([number ^ salt for number in ids])


def _hash_of(text: str) -> int:
    digest = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def check_block_size(value: object, name: str = "block_size") -> int:
    """The value, which has to be a number of tokens."""
    if type(value) is int and 1 <= value <= MAX_BLOCK_SIZE:
        return value
    raise BadRowError(f"{name} is {quoted(value)}, not a number of tokens up to {MAX_BLOCK_SIZE}")


def num_blocks(num_tokens: int, block_size: int) -> int:
    """Blocks of a prompt, the last of which may be partial."""
    return -(-num_tokens // block_size)


def hashed_prompt(block_size: int, ids: tuple[int, ...], num_tokens: int) -> HashedPrompt:
    """A prompt without the ids beyond its length."""
    return HashedPrompt(block_size, ids[: num_blocks(num_tokens, block_size)], num_tokens)


class FileScopes:
    """Cache scopes of files whose ids are numbers given within the file: equal ids mean nothing.

    The first file has the scope "", so that a trace alone has no scope.
    """

    def __init__(self, quality: ReadQuality) -> None:
        self._quality = quality
        self._scopes: dict[str, str] = {}

    def scope(self, file: str) -> str:
        """Scope of a file."""
        scope = self._scopes.get(file)
        if scope is None:
            scope = self._scopes[file] = file if self._scopes else ""
            if scope:
                self._quality.notes["block ids count within a file: files share nothing"] += 1
        return scope


class BlockSizes:
    """Block size of each file whose rows do not name it; the first row of several blocks decides.

    A prompt has `ceil(input_length / size)` ids, or `floor` in traces of full blocks.
    """

    def __init__(self, default: int, quality: ReadQuality) -> None:
        self._default, self._quality = default, quality
        self._sizes: dict[str, int] = {}

    def prompt(
        self, file: str, ids: tuple[int, ...], num_tokens: int | None, named_size: Any = None
    ) -> HashedPrompt:
        """A prompt; ids beyond its length are dropped, tokens beyond its ids share nothing."""
        size = self._size(file, len(ids), num_tokens) if named_size is None else None
        if size is None:
            size = check_block_size(named_size)
        if num_tokens is None:
            return HashedPrompt(size, ids, size * len(ids))
        if not _explains(size, len(ids), num_tokens):
            self._quality.notes["hash_ids and input_length disagree"] += 1
        return hashed_prompt(size, ids, num_tokens)

    def _size(self, file: str, num_ids: int, num_tokens: int | None) -> int:
        size = self._sizes.get(file)
        if size is not None:
            return size
        size = self._default
        if num_tokens is None or num_ids < 2:
            return size
        if not _explains(size, num_ids, num_tokens):
            fitting = (other for other in SIZES if num_blocks(num_tokens, other) == num_ids)
            size = next(fitting, self._default)
            if size != self._default:
                self._quality.notes[f"block size {size} inferred"] += 1
        self._sizes[file] = size
        return size


def _explains(size: int, num_ids: int, num_tokens: int) -> bool:
    return num_tokens // size <= num_ids <= num_blocks(num_tokens, size)
