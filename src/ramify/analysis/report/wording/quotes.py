"""Quoted text before and after, with what changed marked."""

from __future__ import annotations

from dataclasses import dataclass


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
    """Both texts, with what stands between their common start and end marked."""
    head = _num_equal(had, got)
    tail = _num_equal(had[head:][::-1], got[head:][::-1])

    def pieces(text: str) -> tuple[Piece, ...]:
        end = len(text) - tail
        runs = ((text[:head], False), (text[head:end], True), (text[end:], False))
        return tuple(Piece(run, is_changed) for run, is_changed in runs if run)

    return pieces(had), pieces(got)


def _num_equal(had: str, got: str) -> int:
    differs = (at for at, letters in enumerate(zip(had, got, strict=False)) if len({*letters}) > 1)
    return next(differs, min(len(had), len(got)))
