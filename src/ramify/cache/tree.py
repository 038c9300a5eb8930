"""The radix tree over token pages: structure and content, without policy or page ownership.

A node is an integer; field `f` of it is `tree.f[node]`, an entry of a column (a plain list). The cyclic
garbage collector does not traverse columns: with a million nodes as objects, a full collection would
pause the engine for 100 ms. Node 0 stands for "no node".
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, Final, TypeVar

from ramify.cache.child_index import ChildIndex, PageIndex
from ramify.cache.content_atoms import ContentAtoms, slice_atoms
from ramify.cache.gc_untracked import untracked
from ramify.cache.packed import ATOM_BYTES, piece, shared_pages
from ramify.cache.pages import ID_BYTES, Pages
from ramify.cache.types import Node
from ramify.errors import ConfigError

MAX_NEW_IDS: Final = 1024  # columns double up to here, then grow by this many entries
# In `RadixTree.session`: the node's session has ended.
SESSION_ENDED: Final = -1

Value = TypeVar("Value")


class RadixTree:
    """A forest of nodes, one root for each namespace.

    A node is a run of `length` pages. The first `resident` of them have page ids; the others were
    evicted, and only their atoms are kept. A node with `resident == 0` is a ghost. A node with
    resident children, references or a leader is resident in full.

    With a window, the first pages of a node may be released: their ids are `released_page`, and
    others own the pages. The last `owned` of its resident pages are the tree's.

    Args:
        page_size: tokens per page, at least 1.
        window: last tokens that a query reads, itself included; None: all.
        released_page: the id in place of a released page's.
    """

    def __init__(self, page_size: int, window: int | None = None, released_page: int = -1) -> None:
        if page_size < 1:
            raise ConfigError(f"page_size={page_size} but a page holds at least 1 token")
        self.page_size = page_size
        self.page_bytes = page_size * ATOM_BYTES
        self.roots: dict[bytes, int] = {}
        self.namespaces: dict[int, bytes] = {}  # root → its namespace
        self.num_nodes = 0  # with ghosts, without roots
        self.num_ghosts = 0  # nodes without a resident page
        self.num_ghost_pages = 0  # evicted pages of ghosts and of partly evicted nodes
        self.window = window
        self.released_id = released_page.to_bytes(ID_BYTES, sys.byteorder, signed=True)
        self.num_released = 0  # pages that are released now
        self.ever_released = False
        self._free_ids: list[int] = untracked([])
        self.content: dict[int, ContentAtoms] = {}
        self._columns: list[tuple[list[Any], Any]] = []  # (column, its empty value)
        self._inherited: list[list[Any]] = []
        # Columns that `_release_id` empties; `add` and `NodeStore.insert_nodes` overwrite the others.
        self._reset: list[tuple[list[Any], Any]] = []
        self._capacity = 1  # entries in every column
        self.edges: list[bytes | memoryview] = self.column(b"")
        self.pages: list[bytes] = self.column(b"")  # packed ids of its resident pages
        self.root = self.column(0)
        self.parent = self.column(0)
        self.index: ChildIndex = PageIndex(self.edges, self.parent, self.page_bytes)
        self.first_child = self.column(0)  # newest first
        self.next_sibling = self.column(0)
        self.prev_sibling = self.column(0)
        self.length = self.column(0)  # pages in its edge
        self.resident = self.column(0)  # pages of its edge with page ids: the first ones
        self.owned = self.column(0)  # resident pages that are not released: the last ones
        self.resident_children = self.column(0)
        self.start = self.column(0, inherited=True, reset=False)  # pages above the node
        self.ref_count = self.column(0, inherited=True, reset=False)  # leases at or below the node
        self.leader = self.column(0, inherited=True, reset=False)  # who computes it; 0: computed
        self.created_at_lookup = self.column(0, inherited=True, reset=False)
        self.created_s = self.column(0.0, inherited=True, reset=False)
        self.last_access_s = self.column(0.0, inherited=True, reset=False)
        self.hits = self.column(0, inherited=True)
        self.priority = self.column(0, inherited=True)
        self.last_access = self.column(0, inherited=True)
        self.session = self.column(0, inherited=True)  # see `session_table`

    def column(
        self, empty: Value, *, inherited: bool = False, reset: bool | None = None
    ) -> list[Value]:
        """Add a field to all nodes, `empty` at first; returns the column, to index by node.

        Store numbers or bytes only: columns are hidden from the garbage collector, so a reference
        to the cache would never be freed. A column that follows a node's pages must be kept right by
        `split`, `grow`, `refill` and `evict_tail`, which change them.

        Args:
            inherited: `split` copies the value to the new upper half.
            reset: empty the field when its node is forgotten; default: if it is inherited. Node
                ids are reused: without a reset, a new node starts with a dead node's value.
        """
        column = untracked([empty] * self._capacity)
        self._columns.append((column, empty))
        if inherited:
            self._inherited.append(column)
        if inherited if reset is None else reset:
            self._reset.append((column, empty))
        return column

    # -- finding ---------------------------------------------------------------------------

    def find(
        self, root: int, atoms: bytes, end: int, *, pending: bool
    ) -> tuple[list[int], int, int]:
        """Match `atoms[:end]` against the resident pages below `root`.

        Returns (path, part, covered): the nodes matched in full from the root down, then a node
        that is matched in part or 0, and how many of its pages match. `pending`: match pages that
        are still being computed, too.
        """
        path: list[int] = []
        node, position = root, 0
        find, length, resident = self.index.find, self.length, self.resident
        edges, leader, page_bytes = self.edges, self.leader, self.page_bytes
        while position < end:
            child = find(node, atoms, position)
            if not child:
                break
            num_resident = resident[child]
            if not num_resident or (leader[child] and not pending):
                break
            edge = edges[child]
            stop = position + len(edge)
            if stop <= end and num_resident == length[child] and atoms.startswith(edge, position):
                path.append(child)
                node, position = child, stop
                continue
            limit = min(num_resident, (end - position) // page_bytes)
            covered = min(limit, shared_pages(atoms, position, edge, page_bytes))
            return (
                self._readable(path, child, covered)
                if self.num_released
                else (path, child, covered)
            )
        return self._readable(path, 0, 0) if self.num_released else (path, 0, 0)

    def _readable(self, path: list[int], part: int, covered: int) -> tuple[list[int], int, int]:
        """Shorten a result of `find` until no released page is in the window after it."""
        end = self.num_matched_pages(path, part, covered)
        nodes = [*path, part] if part else path
        for at in range(len(nodes) - 1, -1, -1):
            node = nodes[at]
            num_released = self.resident[node] - self.owned[node]
            first_owned = min(end, self.start[node] + num_released)
            if num_released and self.is_in_window(first_owned, end * self.page_size):
                # A prefix that ends earlier in this node would read the same released pages: drop the node.
                end, path, part, covered = self.start[node], nodes[:at], 0, 0
        return path, part, covered

    def is_in_window(self, num_pages: int, num_tokens: int) -> bool:
        """Whether the query at position `num_tokens` reads one of the first `num_pages` pages."""
        window = self.window
        return window is None or num_pages * self.page_size > num_tokens + 1 - window

    def num_matched_pages(self, path: list[int], part: int, covered: int) -> int:
        """The number of pages that a result of `find` matches in all."""
        if part:
            return self.start[part] + covered
        return self.start[path[-1]] + self.length[path[-1]] if path else 0

    def find_including_evicted(
        self, node: int, atoms: bytes, position: int, end: int
    ) -> list[tuple[int, int]]:
        """Match `atoms[position:end]` below `node`, ghosts and pending pages included.

        Returns (node, how many of its pages match) from the top down.
        """
        matches: list[tuple[int, int]] = []
        while position < end:
            node = self.index.find(node, atoms, position)
            if not node:
                break
            edge = self.edges[node]
            shared = shared_pages(atoms, position, edge, self.page_bytes)
            shared = min(shared, (end - position) // self.page_bytes)
            matches.append((node, shared))
            if shared < self.length[node]:
                break
            position += len(edge)
        return matches

    # -- inserting, splitting, forgetting ----------------------------------------------------------------

    def add_root(self, namespace: bytes) -> int:
        """Make the root of a new namespace."""
        root = self.roots[namespace] = self._new_id()
        self.namespaces[root] = namespace
        self.root[root] = root
        self.parent[root] = self.start[root] = self.length[root] = 0
        return root

    def drop_empty_root(self, root: int) -> None:
        """Remove a namespace's root if it has no children, ghosts included, and no references."""
        if not self.first_child[root] and not self.ref_count[root]:
            del self.roots[self.namespaces.pop(root)]
            self._release_id(root)

    def _new_id(self) -> int:
        if not self._free_ids:
            first, num_new = self._capacity, min(MAX_NEW_IDS, self._capacity)
            for column, empty in self._columns:
                column.extend([empty] * num_new)
            self._capacity += num_new
            self._free_ids.extend(range(first + num_new - 1, first - 1, -1))
        return self._free_ids.pop()

    def _release_id(self, node: int) -> None:
        """Free a node's id; it has no references, leader, children or siblings left."""
        for column, empty in self._reset:
            column[node] = empty
        self._free_ids.append(node)

    def add(self, parent: int, atoms: bytes | memoryview, packed: bytes, leader: int) -> int:
        """Add a leaf below `parent`, none of whose children may begin with the same page."""
        node = self._free_ids.pop() if self._free_ids else self._new_id()
        self.edges[node] = atoms
        self.pages[node] = packed
        self.root[node] = self.root[parent]
        self.parent[node] = parent
        self.start[node] = self.start[parent] + self.length[parent]
        self.length[node] = self.resident[node] = self.owned[node] = len(packed) // ID_BYTES
        self.leader[node] = leader
        if head := self.first_child[parent]:
            self.next_sibling[node] = head
            self.prev_sibling[head] = node
        self.first_child[parent] = node
        self.resident_children[parent] += 1
        self.index.add(node)
        self.num_nodes += 1
        return node

    def split(self, node: int, num_pages: int) -> int:
        """Split a node after `num_pages` pages; returns the new upper half.

        `node` stays the lower half, because leases end at it. The upper half inherits references,
        leader, hits, recency and priority.
        """
        assert 0 < num_pages < self.length[node]
        upper, parent = self._new_id(), self.parent[node]
        edge, packed = self.edges[node], self.pages[node]
        cut, resident, owned = num_pages * self.page_bytes, self.resident[node], self.owned[node]
        self.root[upper], self.parent[upper] = self.root[node], parent
        for column in self._inherited:
            column[upper] = column[node]
        self.index.remove(node)
        self.edges[upper] = piece(edge, 0, cut)
        self.pages[upper] = packed[: num_pages * ID_BYTES]
        self.edges[node] = piece(edge, cut, len(edge))
        self.pages[node] = packed[num_pages * ID_BYTES :]
        self.length[upper] = num_pages
        self.resident[upper] = min(resident, num_pages)
        self.start[node] += num_pages
        self.length[node] -= num_pages
        self.resident[node] = lower_resident = max(0, resident - num_pages)
        self.owned[node] = min(owned, lower_resident)
        self.owned[upper] = owned - self.owned[node]
        self.resident_children[upper] = 1 if lower_resident else 0
        self.num_ghosts += not lower_resident  # both halves of a ghost are ghosts
        self._replace_child(node, upper)
        self.first_child[upper] = node
        self.parent[node] = upper
        if content := self.content.pop(node, ()):
            cut_token = num_pages * self.page_size
            self._set_node_content(upper, slice_atoms(content, 0, cut_token))
            self._set_node_content(node, slice_atoms(content, cut_token, len(edge) // ATOM_BYTES))
        self.index.add(upper)
        self.index.add(node)
        self.num_nodes += 1
        return upper

    def _replace_child(self, node: int, replacement: int) -> None:
        """Put `replacement` in a node's place among its siblings; 0 closes the gap."""
        before, after = self.prev_sibling[node], self.next_sibling[node]
        if replacement:
            self.prev_sibling[replacement], self.next_sibling[replacement] = before, after
        if before:
            self.next_sibling[before] = replacement or after
        else:
            self.first_child[self.parent[node]] = replacement or after
        if after:
            self.prev_sibling[after] = replacement or before
        self.prev_sibling[node] = self.next_sibling[node] = 0

    def grow(self, node: int, atoms: bytes | memoryview, packed: bytes) -> None:
        """Append pages to a leaf that is resident in full."""
        count = len(packed) // ID_BYTES
        self.edges[node] = b"".join((self.edges[node], atoms))
        self.pages[node] += packed
        self.length[node] += count
        self.resident[node] += count
        self.owned[node] += count

    def refill(self, node: int, packed: bytes) -> None:
        """Give new page ids to the first evicted pages of a node whose parent is resident."""
        resident = self.resident[node]
        count = len(packed) // ID_BYTES
        self.pages[node] += packed
        self.resident[node] = resident + count
        self.owned[node] += count
        self.num_ghost_pages -= count
        if not resident:
            self.num_ghosts -= 1
            self.resident_children[self.parent[node]] += 1

    def evict_tail(self, node: int, num_pages: int) -> bytes:
        """Take the last `num_pages` page ids off a leaf; it keeps their atoms.

        Returns the ids of owned pages. A node's released pages come first: they go with its last page.
        """
        keep, packed = self.resident[node] - num_pages, self.pages[node]
        self.resident[node] = keep
        self.num_ghost_pages += num_pages
        if keep:
            self.pages[node] = packed[: keep * ID_BYTES]
            self.owned[node] -= num_pages
            return packed[keep * ID_BYTES :]
        self.pages[node] = b""
        self.num_ghosts += 1
        self.resident_children[self.parent[node]] -= 1
        num_released = num_pages - self.owned[node]
        self.owned[node] = 0
        if num_released:
            self.num_released -= num_released
            return packed[num_released * ID_BYTES :]
        return packed

    def forget(self, node: int) -> None:
        """Drop the atoms of a leaf's evicted pages; removes a leaf without resident pages."""
        keep = self.resident[node]
        self.num_ghost_pages -= self.length[node] - keep
        if keep:
            self.edges[node] = piece(self.edges[node], 0, keep * self.page_bytes)
            self.length[node] = keep
            if node in self.content:
                self._set_node_content(
                    node, slice_atoms(self.content.pop(node), 0, keep * self.page_size)
                )
            return
        assert not self.first_child[node] and not self.ref_count[node]
        self.index.remove(node)
        self._replace_child(node, 0)
        self.edges[node] = self.pages[node] = b""
        if self.content:
            self.content.pop(node, None)
        self.num_nodes -= 1
        self.num_ghosts -= 1
        self._release_id(node)

    def set_content(self, node: int, content: ContentAtoms) -> None:
        """Store the content atoms of a whole key that lie in a node."""
        start = self.start[node] * self.page_size
        self._set_node_content(
            node, slice_atoms(content, start, start + self.length[node] * self.page_size)
        )

    def content_from(self, node: int, page: int) -> ContentAtoms:
        """The content atoms of a node from its page `page` on, positions counted from there."""
        content = self.content.get(node, ())
        return slice_atoms(content, page * self.page_size, self.length[node] * self.page_size)

    def _set_node_content(self, node: int, content: ContentAtoms) -> None:
        if content:
            self.content[node] = content

    # -- reading nodes ---------------------------------------------------------------------

    def children(self, node: int) -> Iterator[int]:
        """The children of a node, newest first, ghosts included."""
        child = self.first_child[node]
        while child:
            yield child
            child = self.next_sibling[child]

    def nodes(self, start: int = 0) -> Iterator[int]:
        """All nodes at and below `start` (0: everywhere), parents first; ghosts but no roots."""
        stack = [start] if start else list(self.roots.values())
        while stack:
            node = stack.pop()
            if self.parent[node]:
                yield node
            stack.extend(self.children(node))

    def path(self, node: int) -> list[int]:
        """The nodes from the root, exclusive, down to `node`."""
        path = []
        while self.parent[node]:
            path.append(node)
            node = self.parent[node]
        path.reverse()
        return path

    def edge(self, node: int) -> bytes:
        """The packed atoms of a node."""
        return bytes(self.edges[node])

    def path_pages(self, path: list[int]) -> bytes:
        """The packed ids of the resident pages of all nodes of a path."""
        parts = [self.pages[node] for node in path]
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def node(self, node: int) -> Node:
        """A copy of a node's fields."""
        return Node(
            id=node,
            parent=self.parent[node],
            namespace=self.namespaces[self.root[node]],
            atoms=self.edge(node),
            pages=Pages(self.pages[node]),
            start=self.start[node],
            pins=self.ref_count[node],
            holder=self.leader[node],
            hits=self.hits[node],
            priority=self.priority[node],
            last_access=self.last_access[node],
            created=self.created_at_lookup[node],
            used_s=self.last_access_s[node],
            num_children=self.resident_children[node],
            salt=self.salt_of(node),
            num_released=self.resident[node] - self.owned[node],
            session_ended=self.session[node] == SESSION_ENDED,
        )

    def salt_of(self, node: int) -> bytes | None:
        """The last salt between the root and the end of `node`, or None. O(depth)."""
        while self.content and node:
            for _, atom in reversed(self.content.get(node, ())):
                if atom.salt is not None:
                    return atom.salt
            node = self.parent[node]
        return None
