"""Notes that stood within a conversation and stand in its system prompt now, at the top."""

from __future__ import annotations

from dataclasses import dataclass

from ramify.analysis.compare.prompt_sides import Side

MIN_ALIKE = 16  # tokens that both prompts have behind a note, so that it is in the way


@dataclass(frozen=True, slots=True)
class HoistedNote:
    """A note in a system segment at the top of a prompt."""

    text: str
    head: str  # of the segment, before the note; "": the note is all of it
    is_in_way: bool = True  # what follows it is equal in both prompts


class HoistedNotes:
    """Finds notes at the top of one of two prompts that the other does not have there."""

    def __init__(self, a: Side, b: Side, known: frozenset[str]) -> None:
        self._a, self._b = a, b
        self._known = known  # notes at the top of `a` that stood within its conversation
        self._moved: set[int] = set()  # normal units of `a` that stand at the top of `b`
        self.texts: set[str] = set()  # of the notes that stand at the top of `b`

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
        self.texts.add(note.text)
        return note

    def find_known(self, i: int, j: int) -> HoistedNote | None:
        """The known note of the earlier prompt's segment `i`, if the prompts go on alike without it."""
        a, b = self._a, self._b
        if not self._known or not all(a.role(at) == "system" for at in range(i + 1)):
            return None
        text = a.normal_text(i)
        for note in sorted(self._known, key=lambda note: (-len(note), note)):
            if not text.endswith(note) or b.normal_text(j).endswith(note):
                continue
            head = text[: -len(note)].strip()
            if not head and self._begin_alike(i + 1, j):
                return HoistedNote(note, head)
            if head and b.role(j) == "system":
                is_in_way = self._begin_alike(i + 1, j + 1)
                if is_in_way or head != b.normal_text(j):  # values in the head differ
                    return HoistedNote(note, head, is_in_way)
        return None

    def kept_texts(self) -> frozenset[str]:
        """Notes that stand at the top of the later prompt, whichever request was the first to have them there."""
        b = self._b
        end = b.conversation[0] if b.conversation else len(b.rest)
        tops = [b.normal_text(at) for at in range(end)]
        kept = (note for note in self._known if any(top.endswith(note) for top in tops))
        return frozenset(self.texts).union(kept)

    def _begin_alike(self, i: int, j: int) -> bool:
        if i >= len(self._a.rest) or j >= len(self._b.rest):
            return False
        unit_a, unit_b = self._a.normals[i], self._b.normals[j]
        return unit_a == unit_b or self._b.corpus.shared_tokens(unit_a, unit_b) >= MIN_ALIKE
