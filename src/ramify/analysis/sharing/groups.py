"""Groups of requests with a common prefix, as a forest."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, field

from ramify.analysis.sharing.request_tree import RequestTree, SharingNode


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """Requests that share a prefix; groups inside it share a longer one."""

    id: int  # the tree's node
    parent: int | None  # the group around it
    children: tuple[int, ...]
    prefix_tokens: int  # from the beginning of the prompt
    num_tokens: int  # of those, beyond the parent's
    num_requests: int
    tokens_saved: int  # if `num_tokens` are computed once for the group
    _first: int = field(repr=False)  # of its requests in `_members`
    _members: Members = field(repr=False)

    @property
    def request_ids(self) -> list[Hashable]:
        """Its requests, in order of insertion."""
        return self._members.slice(self._first, self._first + self.num_requests)


@dataclass(frozen=True, slots=True, eq=False)
class Members:
    """All requests in the order of the tree, in which those of a group are neighbours."""

    ids: tuple[Hashable, ...]
    ranks: array[int]  # in order of insertion

    def slice(self, first: int, after: int) -> list[Hashable]:
        """Ids at these places, in order of insertion."""
        places = sorted(range(first, after), key=self.ranks.__getitem__)
        return [self.ids[place] for place in places]


def prefix_groups(tree: RequestTree) -> tuple[PrefixGroup, ...]:
    """Groups of two or more requests, each before the groups inside it.

    Memory grows with nodes and requests: a request is listed once, whatever groups it is in.
    """
    ranks = {request_id: rank for rank, request_id in enumerate(tree.request_ids)}
    ids: list[Hashable] = []
    shared: list[tuple[SharingNode, int]] = []
    children: defaultdict[int, list[int]] = defaultdict(list)
    for node in tree.nodes():
        if node.is_shared:
            shared.append((node, len(ids)))
            if node.parent is not None:
                children[node.parent].append(node.id)
        ids += tree.ending_at(node.id)
    members = Members(tuple(ids), array("q", [ranks[request_id] for request_id in ids]))
    return tuple(
        PrefixGroup(
            id=node.id,
            parent=node.parent,
            children=tuple(children.get(node.id, ())),
            prefix_tokens=node.end,
            num_tokens=node.num_tokens,
            num_requests=node.num_requests,
            tokens_saved=node.tokens_saved,
            _first=first,
            _members=members,
        )
        for node, first in shared
    )
