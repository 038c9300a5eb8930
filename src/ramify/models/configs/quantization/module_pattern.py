r"""Regular expressions of module names, matched in polynomial time whatever a file holds. No torch.

`re` backtracks: `(a+)+$` in a downloaded file would stop the program. Here the places where a part of a
pattern can end are computed together, as bits of an integer: bit p is set if it can end before character p.

There are literals, `.`, `[...]`, `\d \w \s` and their opposites, groups, `|`, `* + ? {m,n}` (lazy ones
too), `^`, `$`, `(?=...)` and `(?!...)`. Back references, `(?<=...)`, atomic groups, flags and `\b` are
refused, and so is what would take long: see the limits below.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

MAX_PATTERN_CHARS = 512
MAX_DEPTH = 16  # of groups
MAX_NESTED_REPEATS = 2
MAX_COUNT = 256
REPEATS = {"*": (0, None), "+": (1, None), "?": (0, 1)}
COUNTS = re.compile(r"\{(?:(\d{1,9})(,(\d{0,9}))?|,(\d{1,9}))\}", re.ASCII)
# Nodes: from a text and the places where a part may begin, the places where it may end.
Node = Callable[[str, int], int]
Test = Callable[[str], bool]


def _is_word(char: str) -> bool:
    return char.isalnum() or char == "_"


CLASSES: dict[str, Test] = {"d": str.isdecimal, "w": _is_word, "s": str.isspace}


class PatternError(ValueError):
    """A text is no pattern, or one that is refused; says why."""


@dataclass(frozen=True, slots=True)
class ModulePattern:
    """A compiled pattern; equal to another of the same text."""

    text: str
    _node: Node = field(repr=False, compare=False)

    def matches_start(self, name: str) -> bool:
        """Whether the pattern matches from the start of a name, as with `re.match`."""
        return self._node(name, 1) != 0


def compile_pattern(text: str) -> ModulePattern:
    """Raises PatternError if the text is no pattern, or one that is refused."""
    if len(text) > MAX_PATTERN_CHARS:
        raise PatternError(f"it has {len(text)} characters, above {MAX_PATTERN_CHARS}")
    return ModulePattern(text, _Parser(text).whole())


class _Parser:
    """Recursive descent over a pattern."""

    def __init__(self, text: str) -> None:
        self._text, self._at, self._depth = text, 0, 0

    def whole(self) -> Node:
        node, _ = self._alternatives()
        if self._at < len(self._text):
            raise PatternError(f"unbalanced ) at {self._at}")
        return node

    def _next(self) -> str:
        if self._at == len(self._text):
            raise PatternError("it ends too early")
        self._at += 1
        return self._text[self._at - 1]

    def _skip(self, prefix: str) -> bool:
        """Whether the rest begins with `prefix`, which is skipped then."""
        begins = self._text.startswith(prefix, self._at)
        self._at += len(prefix) if begins else 0
        return begins

    def _alternatives(self) -> tuple[Node, int]:
        """A node, and how many repeats are nested in it."""
        parts = [self._sequence()]
        while self._skip("|"):
            parts.append(self._sequence())
        nodes = [node for node, _ in parts]
        repeats = max(count for _, count in parts)
        return (nodes[0] if len(nodes) == 1 else _any_of(nodes)), repeats

    def _sequence(self) -> tuple[Node, int]:
        nodes, repeats = list[Node](), 0
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            node, nested = self._repeated(*self._atom())
            nodes.append(node)
            repeats = max(repeats, nested)
        return _all_of(nodes), repeats

    def _repeated(self, node: Node, nested: int) -> tuple[Node, int]:
        bounds = self._bounds()
        if bounds is None:
            return node, nested
        self._skip("?")
        if self._skip("+") or self._bounds() is not None:
            raise PatternError(f"a repeat of a repeat at {self._at}")
        return _repeat(node, *bounds), self._deeper(nested)

    def _bounds(self) -> tuple[int, int | None] | None:
        """The least and the largest count of a repeat; None if none follows."""
        for mark, bounds in REPEATS.items():
            if self._skip(mark):
                return bounds
        counts = COUNTS.match(self._text, self._at)
        if counts is None:
            return None
        self._at = counts.end()
        low, is_range, high, only_high = counts.groups()
        least = int(low or 0)
        most = (
            int(high or only_high)
            if high or only_high
            else (None if is_range is not None else least)
        )
        if most is not None and most < least:
            raise PatternError(f"{counts[0]} ends below its start")
        if max(least, most or 0) > MAX_COUNT:
            raise PatternError(f"{counts[0]} counts above {MAX_COUNT}")
        return least, most

    def _atom(self) -> tuple[Node, int]:
        char = self._next()
        if char == "(":
            return self._group()
        if char in REPEATS:
            raise PatternError(f"nothing to repeat at {self._at - 1}")
        if char == "^":
            return (lambda _name, starts: starts & 1), 0
        if char == "$":
            return _at_end, 0
        return _char(self._test(char)), 0

    def _group(self) -> tuple[Node, int]:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise PatternError(f"groups are nested more than {MAX_DEPTH} deep")
        is_ahead, is_not_ahead = self._skip("?="), self._skip("?!")
        is_plain = is_ahead or is_not_ahead or self._skip("?:")
        if not is_plain and self._skip("?P<"):
            while _is_word(self._next()):
                pass
        elif not is_plain and self._skip("?"):
            raise PatternError(f"(? at {self._at - 2} begins a construct that is refused")
        node, nested = self._alternatives()
        if not self._skip(")"):
            raise PatternError("a ( is not closed")
        self._depth -= 1
        if not is_ahead and not is_not_ahead:
            return node, nested
        return _ahead(node, is_wanted=is_ahead), self._deeper(nested)

    def _deeper(self, nested: int) -> int:
        """The nesting with one more repeat or look ahead, each of which multiplies the time."""
        if nested == MAX_NESTED_REPEATS:
            raise PatternError(
                f"repeats and looks ahead are nested more than {MAX_NESTED_REPEATS} deep"
            )
        return nested + 1

    def _test(self, char: str) -> Test:
        if char == ".":
            return lambda other: other != "\n"
        if char == "[":
            return self._set()
        return self._escaped() if char == "\\" else char.__eq__

    def _escaped(self) -> Test:
        char = self._next()
        if char.lower() in CLASSES:
            test = CLASSES[char.lower()]
            return test if char.islower() else (lambda other: not test(other))
        if _is_word(char) and char != "_":
            raise PatternError(f"\\{char} is refused")
        return char.__eq__

    def _set(self) -> Test:
        is_negated, tests = self._skip("^"), list[Test]()
        while not tests or not self._skip("]"):
            char = self._next()
            if char == "\\":
                tests.append(self._escaped())
                if self._text.startswith("-", self._at):
                    raise PatternError(f"a - behind an escape at {self._at} is refused")
            elif (
                self._text.startswith("-", self._at)
                and self._text[self._at + 1 : self._at + 2] != "]"
            ):
                self._at += 1
                tests.append(_between(char, self._next()))
            else:
                tests.append(char.__eq__)
        return lambda other: any(test(other) for test in tests) != is_negated


def _between(low: str, high: str) -> Test:
    if high == "\\" or high < low:
        raise PatternError(f"{low}-{high} is no range")
    return lambda other: low <= other <= high


def _char(test: Test) -> Node:
    def ends(name: str, starts: int) -> int:
        reached = 0
        starts &= (1 << len(name)) - 1
        while starts:
            lowest = starts & -starts
            if test(name[lowest.bit_length() - 1]):
                reached |= lowest << 1
            starts ^= lowest
        return reached

    return ends


def _all_of(nodes: list[Node]) -> Node:
    def ends(name: str, starts: int) -> int:
        for node in nodes:
            if not starts:
                break
            starts = node(name, starts)
        return starts

    return ends


def _any_of(nodes: list[Node]) -> Node:
    def ends(name: str, starts: int) -> int:
        reached = 0
        for node in nodes:
            reached |= node(name, starts)
        return reached

    return ends


def _repeat(node: Node, least: int, most: int | None) -> Node:
    def ends(name: str, starts: int) -> int:
        for _ in range(least):
            starts = node(name, starts)
            if not starts:
                return 0
        reached, count = starts, least
        while starts and count != most:
            starts = node(name, starts) & ~reached
            reached |= starts
            count += 1
        return reached

    return ends


def _ahead(node: Node, *, is_wanted: bool) -> Node:
    def ends(name: str, starts: int) -> int:
        kept, rest = 0, starts
        while rest:
            lowest = rest & -rest
            if (node(name, lowest) != 0) == is_wanted:
                kept |= lowest
            rest ^= lowest
        return kept

    return ends


def _at_end(name: str, starts: int) -> int:
    """Before a last newline too, as in `re`."""
    before_newline = 1 << (len(name) - 1) if name.endswith("\n") else 0
    return starts & (1 << len(name) | before_newline)
