"""Notes that stood within a conversation and stand in its system prompt now, at the top."""

from __future__ import annotations

from dataclasses import dataclass

from ramify.analysis.compare.prompt_sides import Side


@dataclass(frozen=True, slots=True)
class HoistedNote:
    """A note in a system segment at the top of a prompt."""

    text: str
    head: str  # of the segment, before the note; "": the note is all of it


class HoistedNotes:
    """Finds notes at the top of the later prompt that the earlier one has within its conversation."""

    def __init__(self, a: Side, b: Side) -> None:
        self._a, self._b = a, b
        self._moved: set[int] = set()  # normal units of `a` that stand at the top of `b`

    def is_moved(self, i: int) -> bool:
        """Whether a segment of the earlier prompt is a note that the later one has at the top."""
        return self._a.normals[i] in self._moved

    def find_moved(self, i: int, j: int) -> HoistedNote | None:
        """The note of the later prompt's segment `j`, if the earlier one has it after its segment `i`."""
        a, b = self._a, self._b
        if b.role(j) != "system":
            return None
        mine, other = b.normal_text(j), a.normal_text(i)
        is_other_system = a.role(i) == "system"
        places = (
            at
            for at in range(i + 1, len(a.rest))
            if a.role(at) == "system" and a.message_of[at] != a.message_of[i]
        )
        later = {a.normals[at]: text for at in places if (text := a.normal_text(at))}
        for unit, text in later.items():
            if mine == text or (text in mine and not is_other_system):
                return self._note_move(unit, HoistedNote(text, ""))
        for unit, text in later.items():
            if is_other_system and mine.endswith(text) and text not in other:
                return self._note_move(unit, HoistedNote(text, mine[: -len(text)].strip()))
        return None

    def _note_move(self, unit: int, note: HoistedNote) -> HoistedNote:
        self._moved.add(unit)
        return note
