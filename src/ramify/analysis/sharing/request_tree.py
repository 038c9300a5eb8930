"""`RequestTree`: a compressed radix tree of requests, with exact counts of what they share."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from sys import byteorder

from ramify.analysis.sharing.packed_units import UNIT_BYTES, pack_units, unpack_units
from ramify.cache.packed import shared_pages
from ramify.errors import ConfigError

ROOT = 0
NONE = 0  # no child, no sibling: the root is neither; of requests, number 0 is never used


@dataclass(frozen=True, slots=True)
class SharingNode:
    """A run of tokens that the same requests have in common."""

    id: int
    parent: int | None  # None below no other node
    start: int  # tokens before it
    num_tokens: int
    num_requests: int  # that pass through it or end at it
    num_ending: int

    @property
    def end(self) -> int:
        """Tokens from the beginning of the prompt to the end of the node."""
        return self.start + self.num_tokens

    @property
    def is_shared(self) -> bool:
        """Whether several requests have it."""
        return self.num_requests > 1

    @property
    def tokens_saved(self) -> int:
        """Tokens that need not be computed if it is computed once."""
        return (self.num_requests - 1) * self.num_tokens


class RequestTree:
    """Live requests by their tokens; a run of tokens without a branch is a single node.

    A unit is a token, or with `block_size` the hash of a block of tokens that stands for the block and
    all before it. Memory: about 250 bytes a node and 150 a request, and 8 bytes for each unit that no
    other request has. No call recurses.

    Args:
        block_size: tokens of a unit.
    """

    def __init__(self, *, block_size: int = 1) -> None:
        if not isinstance(block_size, int) or block_size < 1:
            raise ConfigError(f"block_size={block_size!r} but a block holds at least 1 token")
        self.block_size = block_size
        # columns by node; the root is 0 and has no edge
        self._parent, self._first_child = array("i", [NONE]), array("i", [NONE])
        self._next, self._previous = array("i", [NONE]), array("i", [NONE])
        self._num_requests, self._end = array("i", [0]), array("i", [0])
        self._first_request = array("i", [NONE])
        self._node_columns = (
            *(self._parent, self._first_child, self._next, self._previous),
            *(self._num_requests, self._end, self._first_request),
        )
        self._edges: list[bytes] = [b""]
        self._child: dict[int, int] = {}  # by first unit and parent
        self._free_nodes: list[int] = []
        # columns by number of request; the number 0 is unused
        self._number: dict[Hashable, int] = {}
        self._ids: list[Hashable] = [None]
        self._node_of, self._rest = array("i", [ROOT]), array("q", [0])
        self._order = array("q", [0])
        self._next_request, self._previous_request = array("i", [NONE]), array("i", [NONE])
        self._request_columns = (
            *(self._node_of, self._rest, self._order),
            *(self._next_request, self._previous_request),
        )
        self._free_numbers: list[int] = []
        self._num_inserted = 0
        self._total_tokens = self._rest_tokens = self._num_units = 0

    def __len__(self) -> int:
        return len(self._number)

    def __contains__(self, request_id: Hashable) -> bool:
        return request_id in self._number

    @property
    def request_ids(self) -> list[Hashable]:
        """The live requests, in order of insertion."""
        order = self._order
        return sorted(self._number, key=lambda request_id: order[self._number[request_id]])

    @property
    def num_nodes(self) -> int:
        """Nodes below the root."""
        return len(self._edges) - 1 - len(self._free_nodes)

    @property
    def total_tokens(self) -> int:
        """Tokens of all requests."""
        return self._total_tokens

    @property
    def unique_tokens(self) -> int:
        """Tokens if each shared prefix counts once."""
        return self._num_units * self.block_size + self._rest_tokens

    @property
    def tokens_saved(self) -> int:
        """Tokens that are in another request's prefix already."""
        return self._total_tokens - self.unique_tokens

    # -- changes -----------------------------------------------------------------------------

    def insert_request(
        self, request_id: Hashable, tokens: Iterable[int], *, num_tokens: int | None = None
    ) -> None:
        """Add a request; one with the same id is replaced. The tokens are copied.

        Args:
            tokens: ids, or hashes of blocks if the tree has a `block_size`.
            num_tokens: of the prompt, if it is more than whole blocks; the rest is never shared.

        Raises:
            InvalidKeyError: a token is no integer in 0..2^64 - 1. Nothing was changed.
            ConfigError: fewer tokens than the blocks hold.
        """
        packed = pack_units(tokens)
        num_whole = len(packed) // UNIT_BYTES * self.block_size
        rest = 0 if num_tokens is None else num_tokens - num_whole
        if rest < 0:
            raise ConfigError(
                f"num_tokens={num_tokens} but {num_whole // self.block_size} blocks of "
                f"{self.block_size} hold {num_whole}; pass the hashes of whole blocks only"
            )
        self.remove_request(request_id)
        node, at = self._walk(packed)
        if at < self._end[node]:
            node = self._split(node, at)
        if at * UNIT_BYTES < len(packed):
            node = self._add_node(node, packed[at * UNIT_BYTES :])
        self._attach(request_id, node, rest)
        self._total_tokens += num_whole + rest
        self._rest_tokens += rest
        while node != ROOT:
            self._num_requests[node] += 1
            node = self._parent[node]

    def remove_request(self, request_id: Hashable) -> None:
        """Remove a request and what only it had; an unknown id changes nothing."""
        number = self._number.pop(request_id, NONE)
        if number == NONE:
            return
        node = end = self._node_of[number]
        self._total_tokens -= self._end[end] * self.block_size + self._rest[number]
        self._rest_tokens -= self._rest[number]
        self._detach(number, end)
        while node != ROOT:
            self._num_requests[node] -= 1
            node = self._parent[node]
        node = end
        while node != ROOT and not self._num_requests[node]:
            parent = self._parent[node]
            self._drop_node(node)
            node = parent
        self._merge_with_only_child(node)

    # -- questions ---------------------------------------------------------------------------

    def find_shared_prefixes(
        self, tokens: Iterable[int], *, exclude: Hashable = None
    ) -> tuple[list[Hashable], int]:
        """The requests that share the longest prefix with `tokens`, and its length in tokens.

        Args:
            exclude: a request that is not counted, as the one that asks.

        Returns:
            Ids in order of insertion; ([], 0) if no request shares the first unit.
        """
        node, at = self._walk(pack_units(tokens))
        own = self._number.get(exclude, NONE) if exclude is not None else NONE
        above_own = set(self._path(self._node_of[own])) if own else set()
        while node != ROOT and self._num_requests[node] == (node in above_own):
            node = self._parent[node]
            at = self._end[node]
        if node == ROOT:
            return [], 0
        return [
            request_id
            for request_id in self.requests_below(node)
            if request_id != exclude or not own
        ], (at * self.block_size)

    def shared_lengths(self, tokens: Iterable[int]) -> dict[Hashable, int]:
        """Tokens that each request shares with `tokens`, of those that share any."""
        node, at = self._walk(pack_units(tokens))
        ends = {node: at} | {above: self._end[above] for above in self._path(self._parent[node])}
        path = self._path(node)
        if not path:
            return {}
        lengths = {}
        pending = [(path[-1], ends[path[-1]])]
        while pending:
            node, shared = pending.pop()
            for number in self._ending(node):
                lengths[number] = shared * self.block_size
            pending += [(child, ends.get(child, shared)) for child in self._children(node)]
        return {self._ids[number]: lengths[number] for number in self._in_order(lengths)}

    def requests_below(self, node: int) -> list[Hashable]:
        """Ids of the requests that have a node's prefix, in order of insertion."""
        numbers = [number for below in self._below(node) for number in self._ending(below)]
        return [self._ids[number] for number in self._in_order(numbers)]

    def tokens_of(self, request_id: Hashable) -> list[int]:
        """The units of a request.

        Raises:
            KeyError: no live request has this id.
        """
        return self.prefix_of(self._node_of[self._number[request_id]])

    def prefix_of(self, node: int) -> list[int]:
        """The units from the beginning of the prompt to a node's end."""
        return unpack_units(b"".join(self._edges[at] for at in reversed(self._path(node))))

    def node(self, node: int) -> SharingNode:
        """A copy of a node's fields."""
        parent = self._parent[node]
        start = self._end[parent]
        return SharingNode(
            id=node,
            parent=None if parent == ROOT else parent,
            start=start * self.block_size,
            num_tokens=(self._end[node] - start) * self.block_size,
            num_requests=self._num_requests[node],
            num_ending=sum(1 for _ in self._ending(node)),
        )

    def nodes(self, *, min_requests: int = 1) -> Iterator[SharingNode]:
        """Nodes with at least `min_requests` requests, parents first and a node's subtree at once."""
        for node in self._below(ROOT, min_requests):
            if node != ROOT:
                yield self.node(node)

    def ending_at(self, node: int) -> list[Hashable]:
        """Ids of the requests whose last whole unit is the end of a node."""
        return [self._ids[number] for number in self._ending(node)]

    def paths(self) -> Iterator[tuple[list[tuple[int, int]], int]]:
        """For each request in order of insertion: its nodes with their units, and its tokens."""
        end, parent = self._end, self._parent
        for number in self._in_order(self._number.values()):
            node = self._node_of[number]
            num_tokens = end[node] * self.block_size + self._rest[number]
            path = [(at, end[at] - end[parent[at]]) for at in reversed(self._path(node))]
            yield path, num_tokens

    # -- structure ---------------------------------------------------------------------------

    def _walk(self, packed: bytes) -> tuple[int, int]:
        """The deepest node that shares units, and the end of the shared units."""
        units = memoryview(packed).cast("Q")
        node, at = ROOT, 0
        while at < len(units) and self._end[node] == at:
            child = self._child.get(units[at] << 32 | node, NONE)
            if child == NONE:
                break
            at += shared_pages(packed, at * UNIT_BYTES, self._edges[child], UNIT_BYTES)
            node = child
        return node, at

    def _path(self, node: int) -> list[int]:
        """Nodes from `node` up to the root's child."""
        path = []
        while node != ROOT:
            path.append(node)
            node = self._parent[node]
        return path

    def _children(self, node: int) -> Iterator[int]:
        child = self._first_child[node]
        while child != NONE:
            yield child
            child = self._next[child]

    def _below(self, node: int, min_requests: int = 1) -> Iterator[int]:
        """A node and its descendants, each before its own."""
        pending = [node]
        while pending:
            node = pending.pop()
            yield node
            pending += [
                child for child in self._children(node) if self._num_requests[child] >= min_requests
            ]

    def _ending(self, node: int) -> Iterator[int]:
        number = self._first_request[node]
        while number != NONE:
            yield number
            number = self._next_request[number]

    def _in_order(self, numbers: Iterable[int]) -> list[int]:
        return sorted(numbers, key=self._order.__getitem__)

    def _new_node(self, parent: int, edge: bytes) -> int:
        if self._free_nodes:
            node = self._free_nodes.pop()
        else:
            node = len(self._edges)
            self._edges.append(b"")
            for column in self._node_columns:
                column.append(0)
        self._edges[node] = edge
        self._end[node] = self._end[parent] + len(edge) // UNIT_BYTES
        self._link(node, parent)
        return node

    def _add_node(self, parent: int, edge: bytes) -> int:
        self._num_units += len(edge) // UNIT_BYTES
        return self._new_node(parent, edge)

    def _drop_node(self, node: int) -> None:
        self._num_units -= len(self._edges[node]) // UNIT_BYTES
        self._discard(node)

    def _discard(self, node: int) -> None:
        """Unlink a node without children and requests."""
        self._unlink(node)
        self._edges[node] = b""
        self._free_nodes.append(node)

    def _split(self, node: int, at: int) -> int:
        """Cut a node's edge at a depth; returns the new node with the units above the cut."""
        parent, edge = self._parent[node], self._edges[node]
        cut = (at - self._end[parent]) * UNIT_BYTES
        self._unlink(node)
        upper = self._new_node(parent, edge[:cut])
        self._num_requests[upper] = self._num_requests[node]
        self._edges[node] = edge[cut:]
        self._link(node, upper)
        return upper

    def _merge_with_only_child(self, node: int) -> None:
        """Join a node that neither branches nor ends a request with its child."""
        child = self._first_child[node]
        if node == ROOT or child == NONE or self._next[child] or self._first_request[node]:
            return
        parent, edge = self._parent[node], self._edges[node]
        self._unlink(child)
        self._num_requests[node] = 0
        self._discard(node)
        self._edges[child] = edge + self._edges[child]
        self._link(child, parent)

    def _key(self, node: int, parent: int) -> int:
        return int.from_bytes(self._edges[node][:UNIT_BYTES], byteorder) << 32 | parent

    def _link(self, node: int, parent: int) -> None:
        """Make a node the first child of another."""
        after = self._first_child[parent]
        self._parent[node], self._next[node], self._previous[node] = parent, after, NONE
        if after != NONE:
            self._previous[after] = node
        self._first_child[parent] = node
        self._child[self._key(node, parent)] = node

    def _unlink(self, node: int) -> None:
        parent, after, before = self._parent[node], self._next[node], self._previous[node]
        if before == NONE:
            self._first_child[parent] = after
        else:
            self._next[before] = after
        if after != NONE:
            self._previous[after] = before
        del self._child[self._key(node, parent)]

    def _attach(self, request_id: Hashable, node: int, rest: int) -> None:
        """Let a request end at a node."""
        if self._free_numbers:
            number = self._free_numbers.pop()
            self._ids[number] = request_id
        else:
            number = len(self._ids)
            self._ids.append(request_id)
            for column in self._request_columns:
                column.append(0)
        self._number[request_id] = number
        self._num_inserted += 1
        self._order[number], self._rest[number] = self._num_inserted, rest
        after = self._first_request[node]
        self._node_of[number], self._next_request[number] = node, after
        self._previous_request[number] = NONE
        if after != NONE:
            self._previous_request[after] = number
        self._first_request[node] = number

    def _detach(self, number: int, node: int) -> None:
        after, before = self._next_request[number], self._previous_request[number]
        if before == NONE:
            self._first_request[node] = after
        else:
            self._next_request[before] = after
        if after != NONE:
            self._previous_request[after] = before
        self._ids[number] = None
        self._free_numbers.append(number)
