"""A compressed radix tree over prompts, each a sequence of units that are compared token by token."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ramify.analysis.corpus import Corpus
from ramify.analysis.tokens import Tokens, common_len

Units = NDArray[np.uint32]

MAX_RECENT = 4  # newest requests that a node remembers


class _Place(NamedTuple):
    """A place in a prompt: `token` 0 is a unit's head, token i + 1 its i-th token."""

    unit: int
    token: int


class _Node:
    __slots__ = ("children", "end", "owner", "recent", "start")

    def __init__(self, owner: Units, start: _Place, end: _Place) -> None:
        self.owner = owner  # a prompt that passes through the node
        self.start, self.end = start, end  # of the edge that leads to it, in `owner`
        self.children: dict[int, _Node] = {}
        self.recent: list[int] = []  # newest last


class UnitTree:
    """Finds the requests that share the longest prefix with a prompt.

    A prompt's insertion adds at most two nodes; time is linear in its units, plus the tokens of the
    units in which it parts from others.
    """

    def __init__(self, corpus: Corpus) -> None:
        self._corpus = corpus
        self._root = _Node(np.zeros(0, np.uint32), _Place(0, 0), _Place(0, 0))

    def visit(self, prompt: Units) -> list[tuple[int, ...]]:
        """The newest requests of each node on the prompt's path, root first, newest request last.

        The path may end within the edge to the last node.
        """
        visits = [tuple(self._root.recent)]
        node, place = self._root, _Place(0, 0)
        while place.unit < len(prompt):
            child = node.children.get(self._key(prompt, place))
            if child is None:
                break
            place, reached = self._follow(child, prompt, place)
            visits.append(tuple(child.recent))
            if reached != child.end:
                break
            node = child
        return visits

    def insert(self, prompt: Units, number: int) -> None:
        """Add a request, which is newer than all others."""
        node, place = self._root, _Place(0, 0)
        self._remember(node, number)
        end = _Place(len(prompt), 0)
        while place != end:
            key = self._key(prompt, place)
            child = node.children.get(key)
            if child is None:
                child = _Node(prompt, place, end)
                node.children[key] = child
                self._remember(child, number)
                return
            place, reached = self._follow(child, prompt, place)
            if reached != child.end:
                child = self._split(node, key, child, reached)
            self._remember(child, number)
            node = child

    def _split(self, parent: _Node, key: int, child: _Node, at: _Place) -> _Node:
        upper = _Node(child.owner, child.start, at)
        upper.recent = list(child.recent)
        child.start = at
        upper.children[self._key(child.owner, at)] = child
        parent.children[key] = upper
        return upper

    def _follow(self, child: _Node, prompt: Units, place: _Place) -> tuple[_Place, _Place]:
        """Where the prompt and the edge stop being equal: in the prompt, and in the edge's owner."""
        mine, theirs = place, child.start
        owner, end = child.owner, child.end
        while mine.unit < len(prompt) and theirs != end:
            a, b = int(prompt[mine.unit]), int(owner[theirs.unit])
            if a == b and mine.token == theirs.token and theirs.unit < end.unit:
                mine, theirs = _Place(mine.unit + 1, 0), _Place(theirs.unit + 1, 0)
                continue
            own, other = self._items(a), self._items(b)
            stop = len(other) if theirs.unit < end.unit else end.token
            left, right = own[mine.token :], other[theirs.token : stop]
            shared = common_len(left, right)
            mine = _step(mine, shared, len(own))
            theirs = _step(theirs, shared, len(other))
            if shared < len(right) or (mine.token == 0) != (theirs.token == 0):
                break
        return mine, theirs

    def _items(self, unit: int) -> Tokens:
        head = np.array([self._head(unit)], np.uint64)
        return np.concatenate([head, self._corpus.tokens(unit)])

    def _head(self, unit: int) -> int:
        return hash(self._corpus.units[unit].head) & 0xFFFFFFFFFFFFFFFF

    def _key(self, prompt: Units, place: _Place) -> int:
        unit = int(prompt[place.unit])
        if place.token == 0:
            return self._head(unit)
        return int(self._corpus.tokens(unit)[place.token - 1])

    def _remember(self, node: _Node, number: int) -> None:
        node.recent.append(number)
        if len(node.recent) > MAX_RECENT:
            del node.recent[0]


def _step(place: _Place, by: int, num_items: int) -> _Place:
    token = place.token + by
    return _Place(place.unit + 1, 0) if token == num_items else _Place(place.unit, token)
