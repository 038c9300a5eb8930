"""The radix tree over pages: match, split, insert, pin counts; one root per namespace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ramify.cache.key import ATOM_BYTES, CacheKey, common_pages
from ramify.errors import ConfigError, InvariantError


class Node:
    """A run of pages whose atoms follow those of its parent.

    `atoms` are packed int32, a whole number of pages; `children` is keyed by the bytes of the
    child's first page. `pins` counts the leases at or below this node. `holder` is 0 once the
    pages are computed (ready), else the holder that is computing them (pending).
    """

    __slots__ = (
        "atoms",
        "children",
        "depth",
        "hits",
        "holder",
        "last_access",
        "namespace",
        "pages",
        "parent",
        "pins",
        "priority",
    )

    def __init__(
        self, parent: Node | None, atoms: bytes, pages: list[int], holder: int, namespace: bytes
    ) -> None:
        self.parent = parent
        self.namespace = namespace
        self.atoms = atoms
        self.pages = pages
        self.children: dict[bytes, Node] = {}
        self.depth: int = (0 if parent is None else parent.depth) + len(pages)  # in pages
        self.pins = 0
        self.holder = holder
        self.hits = 0
        self.priority = 0
        self.last_access = 0

    @property
    def is_pending(self) -> bool:
        """Whether its K/V is still to be computed."""
        return self.holder != 0

    @property
    def is_leaf(self) -> bool:
        """Whether nothing follows it."""
        return not self.children


class RadixTree:
    """Nodes, and nothing about who may evict or use them.

    Args:
        page_size: tokens per page, at least 1.
    """

    def __init__(self, page_size: int) -> None:
        if page_size < 1:
            raise ConfigError(f"page_size={page_size} but a page holds at least 1 token")
        self.page_size = page_size
        self.page_bytes = page_size * ATOM_BYTES
        self.roots: dict[bytes, Node] = {}
        self.num_nodes = 0  # roots not counted

    def walk(
        self, key: CacheKey, max_pages: int, *, pending: bool, start: Node | None = None
    ) -> tuple[Node | None, int]:
        """The deepest node that a key's first pages reach, and how many of its pages they cover.

        No more than `max_pages` pages count. `pending` says whether pages that are still being
        computed count. `start` is a node whose path the key is known to share. The node is None
        when the namespace is unknown.
        """
        node = start if start is not None else self.roots.get(key.namespace)
        if node is None:
            return None, 0
        atoms, page_bytes = key.atoms, self.page_bytes
        end = max_pages * page_bytes
        position = node.depth * page_bytes
        covered = len(node.pages)
        while position < end:
            child = node.children.get(atoms[position : position + page_bytes])
            if child is None or (child.holder and not pending):
                break
            edge = child.atoms
            stop = position + len(edge)
            node = child
            if stop <= end and atoms[position:stop] == edge:
                position, covered = stop, len(child.pages)
                continue
            room = (end - position) // page_bytes
            shared = common_pages(atoms[position : min(stop, end)], edge, page_bytes)
            return node, min(room, shared)
        return node, covered

    def split(self, node: Node, num_pages: int) -> Node:
        """Cut a node after `num_pages` pages; returns the new upper half.

        The existing object stays the deeper half, so that pins held on it stay balanced; both
        halves keep pins, hits, recency, priority and pending state.
        """
        assert 0 < num_pages < len(node.pages) and node.parent is not None
        cut = num_pages * self.page_bytes
        upper = Node(
            node.parent, node.atoms[:cut], node.pages[:num_pages], node.holder, node.namespace
        )
        upper.pins, upper.hits, upper.priority = node.pins, node.hits, node.priority
        upper.last_access = node.last_access
        node.parent.children[node.atoms[: self.page_bytes]] = upper
        node.parent = upper
        node.atoms, node.pages = node.atoms[cut:], node.pages[num_pages:]
        upper.children[node.atoms[: self.page_bytes]] = node
        self.num_nodes += 1
        return upper

    def root(self, namespace: bytes) -> Node:
        """The root of a namespace, made when there is none."""
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = Node(None, b"", [], 0, namespace)
        return root

    def add_child(self, parent: Node, atoms: bytes, pages: list[int], holder: int) -> Node:
        """Hang a new node below `parent`, which must have no child with that first page."""
        first = atoms[: self.page_bytes]
        assert pages and len(atoms) == len(pages) * self.page_bytes
        assert first not in parent.children
        node = parent.children[first] = Node(parent, atoms, pages, holder, parent.namespace)
        self.num_nodes += 1
        return node

    def extend(self, node: Node, atoms: bytes, pages: Sequence[int]) -> None:
        """Append pages to a leaf in place."""
        assert node.is_leaf and node.parent is not None
        node.atoms += atoms
        node.pages.extend(pages)
        node.depth += len(pages)

    def trim(self, node: Node, num_pages: int) -> list[int]:
        """Cut the last `num_pages` pages off a leaf; a leaf without pages leaves the tree."""
        assert node.is_leaf and node.parent is not None
        keep = len(node.pages) - num_pages
        cut = node.pages[keep:]
        if keep == 0:
            self.remove(node)
        else:
            del node.pages[keep:]
            node.atoms = node.atoms[: keep * self.page_bytes]
            node.depth -= num_pages
        return cut

    def remove(self, node: Node) -> None:
        """Take a leaf out of the tree; its `pages` stay on the object, its parent does not."""
        assert node.is_leaf and node.parent is not None
        del node.parent.children[node.atoms[: self.page_bytes]]
        node.parent = None  # a queue that still holds the object sees that it has left
        self.num_nodes -= 1

    def drop_empty_root(self, namespace: bytes) -> None:
        """Forget a namespace that holds nothing and is pinned by nobody."""
        root = self.roots.get(namespace)
        if root is not None and root.is_leaf and root.pins == 0:
            del self.roots[namespace]

    @staticmethod
    def path(node: Node) -> list[Node]:
        """The nodes from below the root down to `node`."""
        found = []
        at: Node | None = node
        while at is not None and at.parent is not None:
            found.append(at)
            at = at.parent
        found.reverse()
        return found

    def nodes(self, start: Node | None = None) -> Iterator[Node]:
        """All nodes at and below `start`, parents first; by default the whole tree, no roots."""
        stack = [start] if start is not None else list(self.roots.values())
        while stack:
            node = stack.pop()
            if node.parent is not None:
                yield node
            stack.extend(node.children.values())

    def check(self) -> None:
        """Recount everything a tree can know about itself.

        Raises:
            InvariantError: links, depths, keys, pins or pending states contradict each other.
        """
        count = 0
        for node in self.nodes():
            count += 1
            parent = node.parent
            assert parent is not None
            if not node.pages or len(node.atoms) != len(node.pages) * self.page_bytes:
                raise InvariantError(f"a node has {len(node.pages)} pages, {len(node.atoms)} bytes")
            if parent.children.get(node.atoms[: self.page_bytes]) is not node:
                raise InvariantError("a child is not found under its first page")
            if node.depth != parent.depth + len(node.pages):
                raise InvariantError(f"depth {node.depth} under depth {parent.depth}")
            if node.pins > parent.pins:
                raise InvariantError(f"{node.pins} pins below {parent.pins}")
            if parent.is_pending and not node.is_pending:
                raise InvariantError("a ready node hangs below a pending one")
            if node.is_pending and node.pins == 0:
                raise InvariantError("a pending node is held by nobody")
        if count != self.num_nodes:
            raise InvariantError(f"{count} nodes found, {self.num_nodes} counted")
