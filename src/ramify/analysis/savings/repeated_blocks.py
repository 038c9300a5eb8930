"""Blocks of context that a client sends anew in each newest message: mended, each is sent once."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from ramify.analysis.compare.context_blocks import MIN_BLOCK
from ramify.analysis.compare.normal_forms import normalise_spaces
from ramify.analysis.compare.prompt_sides import PlacedUnit, WalkStep
from ramify.analysis.corpus import Corpus, StoredRequest
from ramify.analysis.verdicts import CauseName


class RepeatedBlocks:
    """The blocks that moved between a request and its match, by request."""

    def __init__(self, corpus: Corpus) -> None:
        self._corpus = corpus
        self._moved: dict[int, list[tuple[str, str]]] = {}  # segment of the cause, block

    def note(
        self, earlier: StoredRequest, request: StoredRequest, first: tuple[int, int], step: WalkStep
    ) -> None:
        """Learn from a step between two prompts, whose segments after the tools begin at `first`."""
        segments = [path for cause, path in step.causes if cause is CauseName.CONTEXT_MOVED]
        if not segments:
            return
        had, got = (
            [
                self._corpus.text(unit)
                for unit in sent.units[
                    first[side] + step.start[side] : first[side] + step.stop[side]
                ]
            ]
            for side, sent in enumerate((earlier, request))
        )
        moved = self._moved.setdefault(request.number, [])
        for text in had:
            stays = max((item for item in got if item in text), key=len, default="")
            block = text.replace(stays, "", 1).strip("\n")
            if len(block) >= MIN_BLOCK:
                moved.append((segments[0], block))

    def moved(self, request: StoredRequest) -> Iterable[tuple[str, str]]:
        """Segment and text of each block that the match had where the request has none."""
        return self._moved.get(request.number, ())

    def standing(self, blocks: Iterable[str], segments: Iterable[PlacedUnit]) -> frozenset[str]:
        """The blocks that stand in the segments."""
        texts = [self._corpus.text(unit) for unit, _ in segments] if blocks else []
        return frozenset(
            block
            for block in blocks
            if any(form in text for form in _forms(block) for text in texts)
        )

    def without(
        self, segments: Iterable[PlacedUnit], blocks: Collection[str]
    ) -> Iterator[PlacedUnit]:
        """The segments without these blocks; what a model or a tool says stays as it is."""
        for unit, path in segments:
            text = rest = self._corpus.text(unit)
            label = self._corpus.units[unit].label
            is_said = label.startswith(("tool", "assistant")) or " " in label
            for form in () if is_said else (form for block in blocks for form in _forms(block)):
                if form in rest:
                    rest = rest.replace(form, "").strip("\n")
            if rest == text:
                yield unit, path
            elif rest:
                yield self._corpus.unit_like(unit, rest), path


def _forms(block: str) -> tuple[str, str]:
    """A block as sent, and as it stands in a text whose white space is mended."""
    return block, normalise_spaces(block)
