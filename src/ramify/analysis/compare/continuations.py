"""Whether one request continues another's conversation, from ids and message texts."""

from __future__ import annotations

import re

from ramify.analysis.compare.context_blocks import MIN_BLOCK, split_block
from ramify.analysis.compare.prompt_sides import MIN_SAID, Side
from ramify.analysis.compare.summaries import is_summary
from ramify.analysis.records import TextForm

_WORD = re.compile(r"\w+")


def is_continuation(a: Side, b: Side) -> bool:
    """Whether request `b` continues the conversation of the earlier request `a`."""
    mine, other = b.request.info, a.request.info
    if mine.parent_id is not None and mine.parent_id == other.request_id:
        return True
    has_names = mine.conversation is not None and other.conversation is not None
    if has_names and mine.conversation != other.conversation:
        return False
    if not len(a.normals) or not len(b.normals):
        return has_names
    return _goes_on(a, b) or (has_names and _is_same_thread(a, b))


def _is_same_thread(a: Side, b: Side) -> bool:
    """Whether a request of the same session may go on with the earlier one, with other texts.

    A session also has requests that are no turns of one conversation: those of sub-agents, titles, steps of a
    pipeline. A turn is longer and begins alike, or is shorter and has a summary at its start.
    """
    if not a.conversation or not b.conversation:
        return True
    num_a, num_b = (len({side.message_of[at] for at in side.conversation}) for side in (a, b))
    first_two = b.conversation[:2]
    if num_b > num_a:
        return any(_are_alike(a, a.conversation[0], b, at) for at in first_two)
    texts = (b.corpus.text(b.rest[at]) for at in first_two)
    return num_b < num_a and any(is_summary(text, is_certain=False) for text in texts)


def _goes_on(a: Side, b: Side) -> bool:
    """Whether the texts say that a request goes on with the earlier one's conversation."""
    if a.last_message & b.older_messages and _is_same_conversation(a, b, a.last_at, a.last_message):
        return True
    return _goes_on_after_answer(a, b) or _repeats_last_message(a, b) or _begins_with_all(a, b)


def _begins_with_all(a: Side, b: Side) -> bool:
    """Whether the same program's prompt begins with all messages of the earlier one, short as they are.

    Values may have changed, and media may be gone or have another text in their place.
    """
    if len(a.rest) >= len(b.rest):
        return False
    places_a, places_b = a.conversation, b.conversation
    if not places_a or not a.canonical_system or a.canonical_system != b.canonical_system:
        return False
    # A block that stands in the newest message again has moved.
    while len(places_a) > 1 and a.normals[places_a[-1]] in b.last_message:
        places_a = places_a[:-1]
    at = 0
    for place in places_a:
        is_media = a.corpus.units[a.rest[place]].form is TextForm.MEDIA
        if at == len(places_b):
            return False
        other = places_b[at]
        if is_media:
            at += a.message_of[place] == b.message_of[other]
        elif a.normals[place] == b.normals[other] or a.canonical(place) == b.canonical(other):
            at += 1
        else:
            return False
    return at < len(places_b) and b.message_of[places_b[at]] != a.message_of[places_a[-1]]


def _goes_on_after_answer(a: Side, b: Side) -> bool:
    """Whether the last answer in the earlier request has more messages behind it in the later one."""
    at = next((i for i in range(len(a.rest) - 1, -1, -1) if a.is_answer(i)), None)
    if at is None or a.normals[at] not in b.older_messages:
        return False
    place = len(b.normals) - 1 - b.normals[::-1].index(a.normals[at])
    if len(set(b.message_of[place:])) <= len(set(a.message_of[at:])):
        return False
    if not _is_same_conversation(a, b, at, frozenset((a.normals[at],))):
        return False
    head_a, head_b = (_messages_before(side, end) for side, end in ((a, at), (b, place)))
    return head_a == head_b or _asks_alike(a, b, at, place)


def _is_same_conversation(a: Side, b: Side, end: int, shared: frozenset[int]) -> bool:
    """Whether more than one shared stock message (button, refusal, example) links the two.

    More is another message that both have, or that nothing, or a single message such as a summary,
    stands before the shared message.
    """
    before = [
        unit for unit in _messages_before(a, end) if a.corpus.units[unit].num_chars >= MIN_SAID
    ]
    if not before or not b.older_messages.isdisjoint(before):
        return True
    place = next(at for at, unit in enumerate(b.normals) if unit in shared)
    heads = {b.message_of[at] for at in b.conversation if at < place}
    return len(heads - {b.message_of[place]}) <= 1


def _messages_before(side: Side, end: int) -> list[int]:
    """Messages before a place in normal form, system prompts not counted."""
    return [side.normals[at] for at in side.conversation if at < end]


def _asks_alike(a: Side, b: Side, at: int, place: int) -> bool:
    """Whether what follows an answer in both may be one message, unless a user asks for another thing.

    Examples that a program picks for each question stand in another order, with other ones behind.
    """
    places = []
    for side, answer in ((a, at), (b, place)):
        later = (place for place in side.conversation if place > answer)
        message = side.message_of[answer]
        following = next((place for place in later if side.message_of[place] != message), None)
        if following is None:
            return True
        unit = side.corpus.units[side.rest[following]]
        if unit.label != "user" or unit.form is not TextForm.TEXT:
            return True
        places.append(following)
    return _are_alike(a, places[0], b, places[1])


def _are_alike(a: Side, at: int, b: Side, place: int) -> bool:
    """Whether two texts have half of the shorter one's words in common."""
    if a.canonical(at) == b.canonical(place):
        return True
    mine, other = (
        set(_WORD.findall(side.corpus.text(side.normals[number]).lower()))
        for side, number in ((a, at), (b, place))
    )
    return 2 * len(mine & other) >= min(len(mine), len(other))


def _repeats_last_message(a: Side, b: Side) -> bool:
    """Whether an older message is the earlier request's last without a block at its start or end."""
    if a.role(a.last_at) != "user":
        return False
    last = "\n".join(b.corpus.text(normal) for normal in b.normals[b.last_at :])
    for normal in a.normals[a.last_at :]:
        text = a.corpus.text(normal)
        lines = set(text.split("\n"))
        for at in range(b.last_at):
            if b.role(at) != "user":
                continue
            other = b.corpus.text(b.normals[at])
            mine = other.split("\n")
            equal = sum(len(line) for line in mine if line in lines)
            if len(other) < MIN_SAID or equal * 2 < len(other) or other == text:
                continue
            block, stripped = split_block(text, other, last)
            if len(block) >= MIN_BLOCK and (mine[-1] in lines or mine[0] in lines):
                return stripped == other or mine[-1] in lines
    return False
