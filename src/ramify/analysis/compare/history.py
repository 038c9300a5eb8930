"""What a client does to older messages: summaries in their place, messages dropped, results cut."""

from __future__ import annotations

from bisect import bisect_left
from functools import cached_property

from ramify.analysis.compare.prompt_sides import MIN_SAID, Side
from ramify.analysis.compare.summaries import is_compaction_item, is_summary, says_it_continues
from ramify.analysis.records import TextForm

MIN_SUMMARY = 60  # code points; a shorter text must name what it summarises


def goes_on_from_summary(a: Side, b: Side) -> bool:
    """Whether a request begins with a summary that may be of the earlier one's conversation.

    If the earlier one begins with another summary, a message behind both has to be the same.
    """
    if b.summary_at is None:
        return False
    if a.summary_at is None or a.normals[a.summary_at] == b.normals[b.summary_at]:
        return True
    return not _behind_summary(a).isdisjoint(_behind_summary(b))


def _behind_summary(side: Side) -> set[int]:
    start = 0 if side.summary_at is None else side.summary_at + 1
    units = side.normals[start:]
    return {unit for unit in units if side.corpus.units[unit].num_chars >= MIN_SAID}


class History:
    """Predicates over places `i`, `j` of an earlier prompt `a` and a later prompt `b`."""

    def __init__(self, a: Side, b: Side, *, continues: bool) -> None:
        self._a, self._b, self._continues = a, b, continues

    def is_compaction(self, i: int, j: int) -> bool:
        """Whether a summary stands at `j` where the head of the conversation stood at `i`."""
        a, b = self._a, self._b
        had, got = a.text(i), b.text(j)
        if b.role(j) == "system" == a.role(i) and got.startswith(had):
            got = got[len(had) :].lstrip()  # the system prompt takes the summary in
        roles = ("user", "system", "assistant")
        if had == got or (b.role(j) not in roles and not is_compaction_item(got)):
            return False
        is_certain = not self._continues or len(got) < MIN_SUMMARY
        if not is_summary(got, is_certain=is_certain):
            return False
        is_mid_conversation = self._continues or not b.is_newest(j) or len(a.rest) - i > 2
        return is_mid_conversation or self.replaces_summary(i, j)

    def replaces_summary(self, i: int, j: int) -> bool:
        """Whether both conversations begin with a summary, each with another."""
        b = self._b
        if (i, j) != (self._a.summary_at, b.summary_at):
            return False
        # A task about a summary stands alone as well.
        return says_it_continues(b.text(j)) or not b.is_newest(j)

    def takes_in_summary(self, i: int, j: int) -> bool:
        """Whether the system prompt is longer by a summary, and other messages follow it."""
        a, b = self._a, self._b
        is_longer = b.text(j).startswith(a.text(i))
        if not is_longer or a.role(i) != "system" or b.role(j) != "system":
            return False
        is_same_conversation = a.normals[i + 1 : i + 2] == b.normals[j + 1 : j + 2]
        return not is_same_conversation and self.is_compaction(i, j)

    def is_edited_result(self, i: int, j: int) -> bool:
        """Whether an older result of a tool call was cut or edited when the conversation went on."""
        a, b = self._a, self._b
        left, right = a.unit(i), b.unit(j)
        if left.label != right.label or " " not in left.label or b.is_newest(j):
            return False
        return self._continues and left.form is right.form

    def is_reasoning_change(self, i: int, j: int) -> bool:
        """Whether reasoning is gone, new or other in an answer that both have.

        Reasoning is at `i`, at `j`, or at both.
        """
        a, b = self._a, self._b
        if not self._continues:
            return False
        if not a.is_reasoning(i):
            return a.is_answer(i)  # else all of the answer is new
        if not b.is_reasoning(j):
            return True
        equal_at = self.next_equal(i, j)
        return equal_at is None or equal_at[1] != j  # else the answers before it were dropped

    def is_media_change(self, i: int, j: int) -> bool:
        """Whether media at `i`, at `j`, or at both, is gone, new or other within a conversation."""
        return self._continues and (self.is_other_medium(i, j) or not self.is_compaction(i, j))

    def is_other_medium(self, i: int, j: int) -> bool:
        """Whether the same segment follows media at `i` and what stands at `j` instead."""
        a, b = self._a, self._b
        behind = a.normals[i + 1 : i + 2]
        is_media = a.unit(i).form is TextForm.MEDIA
        return is_media and bool(behind) and behind == b.normals[j + 1 : j + 2]

    def goes_on_without(self, i: int, j: int) -> bool:
        """Whether the later prompt goes on at `j` as the earlier one does behind its block `i`."""
        a, b = self._a, self._b
        if i + 1 == len(a.rest):
            # The block closed the earlier prompt: its message goes on, or an answer follows.
            return not b.is_newest(j) and b.is_answer(j)
        return a.normals[i + 1] == b.normals[j] or self.is_other_medium(i + 1, j)

    def next_equal(self, i: int, j: int) -> tuple[int, int] | None:
        """Where messages are equal again after older ones that are dropped, cut or edited."""
        a, b = self._a, self._b
        if not self._continues:
            return None
        places, common = self._common_messages
        for number in range(bisect_left(common, j), len(common)):
            at = common[number]
            following = places[b.normals[at]]
            rank = bisect_left(following, i)
            if rank == len(following):
                continue
            equal_at = following[rank]
            if equal_at == i and at == j:
                continue
            if b.is_newest(at) and (equal_at != len(a.rest) - 1 or b.is_newest(j)):
                continue  # the user edits the newest message
            return equal_at, at
        return None

    @cached_property
    def _common_messages(self) -> tuple[dict[int, list[int]], list[int]]:
        """Places of the earlier prompt's texts, in order, and the later one's places that have them."""
        a, b = self._a, self._b
        places: dict[int, list[int]] = {}
        for at, normal in enumerate(a.normals):
            if a.unit(at).num_chars >= MIN_SAID:
                places.setdefault(normal, []).append(at)
        return places, [at for at, normal in enumerate(b.normals) if normal in places]
