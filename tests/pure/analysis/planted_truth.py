"""How two prompts differ, as the contract of `lint` counts. Stdlib only."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tests.pure.analysis.planted_bodies import Piece


@dataclass(frozen=True, slots=True)
class TrueDivergence:
    """Where two requests first differ; several places if the contract leaves a choice."""

    places: frozenset[tuple[str, int]]
    may_be_none: bool = False

    @property
    def paths(self) -> frozenset[str]:
        """Segments of the places."""
        return frozenset(path for path, _ in self.places)


def shared_chars(left: list[Piece], right: list[Piece]) -> int:
    """Code points of the common prefix."""
    total = 0
    for mine, other in zip(left, right, strict=False):
        if mine.content == other.content and mine.kind == other.kind and mine.role == other.role:
            total += len(mine.content) + 4
            continue
        if mine.kind == other.kind and mine.role == other.role and mine.chars and other.chars:
            total += common_prefix(mine.chars, other.chars)
        break
    return total


def common_prefix(left: str, right: str) -> int:
    """Code points that two texts have in common at the start."""
    end = min(len(left), len(right))
    low, high = 0, end
    while low < high:
        middle = (low + high + 1) // 2
        if left[:middle] == right[:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def divergence_of(mine: list[Piece], other: list[Piece]) -> TrueDivergence | None:
    """Where a request first differs from an earlier one; None if one is a prefix of the other."""
    settings = {piece.path: piece.content for piece in mine if piece.kind == "setting"}
    others = {piece.path: piece.content for piece in other if piece.kind == "setting"}
    for path in ["settings.model", *sorted(settings.keys() | others.keys() - {"settings.model"})]:
        if settings.get(path) != others.get(path):
            return TrueDivergence(frozenset({(path, 0)}))
    mine = [piece for piece in mine if piece.kind != "setting"]
    other = [piece for piece in other if piece.kind != "setting"]
    for at, (left, right) in enumerate(zip(mine, other, strict=False)):
        same_role = left.role == right.role
        if left.content == right.content and left.kind == right.kind and same_role:
            continue
        if left.kind != right.kind or left.chars is None or right.chars is None:
            return TrueDivergence(frozenset({(left.path, 0), (right.path, 0)}))
        char = common_prefix(left.chars, right.chars)
        places = {(left.path, char)}
        is_thought = (left.content == left.chars) != (right.content == right.chars)
        if not same_role or is_thought:
            places |= {(left.path, 0)}
        if left.path.split(".")[0] != right.path.split(".")[0]:
            places |= {(left.path, 0), (right.path, 0)}
        is_end = (char == len(right.chars) and at == len(other) - 1) or (
            char == len(left.chars) and at == len(mine) - 1
        )
        return TrueDivergence(frozenset(places), may_be_none=is_end and same_role)
    return None


def first_differing(mine: list[Piece], other: list[Piece]) -> tuple[Piece, Piece] | None:
    """The first pieces that differ, without their paths; None if one list is the start of the other."""
    for left, right in zip(mine, other, strict=False):
        bare = replace(left, path=""), replace(right, path="")
        if bare[0] != bare[1]:
            return bare
    return None
