"""Quoted text before and after, with the characters that changed marked."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import SequenceMatcher

MAX_DIFF_CHARS = 600  # a longer quote is compared by its common start and end only
_MIN_EQUAL = 2  # shorter equal runs between changes read as noise
_MIN_SHARE = 0.4  # of equal characters; texts with fewer are different texts


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of a quoted text."""

    text: str
    is_changed: bool


Marks = tuple[tuple[Piece, ...], tuple[Piece, ...]]  # of the text before and after


def mark_quotes(had: str, got: str, segment: str) -> Marks:
    """Mark what changed in a finding's quotes; without a segment (times, counts) mark nothing."""
    if segment:
        return mark_changes(had, got)
    return (Piece(had, is_changed=False),), (Piece(got, is_changed=False),)


def mark_changes(had: str, got: str) -> Marks:
    """Both texts as runs that are equal and runs that changed."""
    if max(len(had), len(got)) > MAX_DIFF_CHARS:
        return _mark_middle(had, got)
    before: list[Piece] = []
    after: list[Piece] = []
    matcher = SequenceMatcher(None, had, got, autojunk=False)
    if matcher.ratio() < _MIN_SHARE:
        return _whole(had), _whole(got)
    opcodes = matcher.get_opcodes()
    for number, (tag, had_from, had_to, got_from, got_to) in enumerate(opcodes):
        is_noise = had_to - had_from < _MIN_EQUAL and 0 < number < len(opcodes) - 1
        is_changed = tag != "equal" or is_noise
        _append(before, had[had_from:had_to], is_changed=is_changed)
        _append(after, got[got_from:got_to], is_changed=is_changed)
    return tuple(before), tuple(after)


def _whole(text: str) -> tuple[Piece, ...]:
    return (Piece(text, is_changed=True),) if text else ()


def _mark_middle(had: str, got: str) -> Marks:
    shorter = min(len(had), len(got))
    head = next((at for at in range(shorter) if had[at] != got[at]), shorter)
    tail = next(
        (at for at in range(shorter - head) if had[-1 - at] != got[-1 - at]), shorter - head
    )

    def pieces(text: str) -> tuple[Piece, ...]:
        runs: list[Piece] = []
        _append(runs, text[:head], is_changed=False)
        _append(runs, text[head : len(text) - tail], is_changed=True)
        _append(runs, text[len(text) - tail :], is_changed=False)
        return tuple(runs)

    return pieces(had), pieces(got)


def _append(pieces: list[Piece], text: str, *, is_changed: bool) -> None:
    if not text:
        return
    if pieces and pieces[-1].is_changed == is_changed:
        pieces[-1] = Piece(pieces[-1].text + text, is_changed)
    else:
        pieces.append(Piece(text, is_changed))
