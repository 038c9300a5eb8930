"""Best matches of prompts of which only the ids of blocks are known."""

from __future__ import annotations

from ramify.analysis.records import HashedPrompt, LoggedRequest

_Scope = tuple[str, str | None, int]


class HashedIndex:
    """The newest request that has each block; equal ids mean equal prefixes.

    Nothing can be mended without texts, so that the longest shared prefix is the best match, the newest
    request on a tie. Memory grows with the number of different blocks.
    """

    def __init__(self) -> None:
        self._newest: dict[_Scope, dict[int, int]] = {}

    def find(self, info: LoggedRequest, prompt: HashedPrompt) -> tuple[int, int] | None:
        """Number of the best match and the tokens shared with it; None if nothing is shared.

        Whole blocks only: what the last block has of its tokens is not known of both prompts.
        """
        newest = self._newest.get(_scope(info, prompt), {})
        deepest, depth = -1, 0
        for block in prompt.full_blocks:
            holder = newest.get(block)
            if holder is None:
                break
            deepest, depth = holder, depth + 1
        return (deepest, depth * prompt.block_size) if depth else None

    def insert(self, number: int, info: LoggedRequest, prompt: HashedPrompt) -> None:
        """Add a request, which becomes the newest with its blocks."""
        newest = self._newest.setdefault(_scope(info, prompt), {})
        for block in prompt.full_blocks:
            newest[block] = number


def _scope(info: LoggedRequest, prompt: HashedPrompt) -> _Scope:
    return info.cache_scope, info.model, prompt.block_size
