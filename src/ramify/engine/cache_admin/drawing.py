"""The prefix tree as lines of text, for terminals and notebooks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Protocol

from ramify.counts import counted

MAX_TEXT = 60  # characters of a node's text


class DrawnNode(Protocol):
    """What is drawn of a node; `TreeNode` has it."""

    @property
    def id(self) -> int:
        """Of the node."""

    @property
    def parent(self) -> int:
        """Id of the node above; 0: none."""

    @property
    def num_tokens(self) -> int:
        """Of the node itself."""

    @property
    def hits(self) -> int:
        """Lookups that read it."""

    @property
    def pins(self) -> int:
        """Requests and pins that hold it now."""

    @property
    def tenant(self) -> str:
        """Whose it is; empty: everybody's."""

    @property
    def text(self) -> str:
        """Its beginning."""

    @property
    def token_ids(self) -> Sequence[int]:
        """Its first tokens."""


def draw_tree(nodes: Sequence[DrawnNode], num_nodes: int) -> str:
    """The nodes as a tree, a line for each, and a line for those that are not among them.

    Args:
        nodes: parents before their children.
        num_nodes: in the whole cache.
    """
    if not nodes:
        return "nothing is cached"
    lines = [*_lines(nodes)]
    if num_nodes > len(nodes):
        lines.append(f"… and {counted(num_nodes - len(nodes), 'more node')}, with fewer hits")
    return "\n".join(lines)


def _lines(nodes: Sequence[DrawnNode]) -> Iterator[str]:
    num_left = Counter(node.parent for node in nodes)  # children of each node still to come
    indents = {0: ""}
    for node in nodes:
        num_left[node.parent] -= 1
        is_last = not num_left[node.parent]
        indent = indents[node.parent]
        yield f"{indent}{'└─' if is_last else '├─'} {describe_node(node)}"
        indents[node.id] = indent + ("   " if is_last else "│  ")


def describe_node(node: DrawnNode) -> str:
    """Tokens, hits, holders and the beginning of the text, in a line."""
    parts = [counted(node.num_tokens, "token"), counted(node.hits, "hit")]
    if node.pins:
        parts.append(f"held by {node.pins:,}")
    if node.tenant:
        parts.append(f"tenant {one_line(node.tenant)}")
    text = one_line(node.text)
    parts.append(f"“{text}”" if text else "ids " + " ".join(map(str, node.token_ids[:8])))
    return " · ".join(parts)


def one_line(text: str) -> str:
    """A text without what would move a cursor, cut to `MAX_TEXT` characters."""
    shown = "".join(char if char.isprintable() else " " for char in text)
    return shown if len(shown) <= MAX_TEXT else shown[: MAX_TEXT - 1] + "…"
