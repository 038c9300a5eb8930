"""Prompt rules in a conversation: text out of the system prompt, into a message behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ramify.prompt_rules import AppliedRule, PromptRule, Target, take_out
from ramify.server.conversation.conversation import Conversation
from ramify.server.conversation.parts import HiddenPart, Line, Message, Part, ResultPart, TextPart


@dataclass(frozen=True, slots=True)
class TakenText:
    """A text that a rule has taken out, and its request field."""

    rule: PromptRule
    path: str
    text: str


def apply_rules(conversation: Conversation, rules: Sequence[PromptRule]) -> Conversation:
    """The conversation without what rules take out of its system prompt, which its messages then have.

    The system prompt is the field beside the messages, and the messages with this role before all others.
    Without a message that could take the text, rules which move text do nothing.
    """
    first, last = _first_question(conversation.messages), _last_input(conversation.messages)
    if first is None or last is None:
        rules = [rule for rule in rules if rule.target is Target.NOWHERE]
    if not rules:
        return conversation
    taken: list[TakenText] = []
    system = conversation.system
    if system is not None:
        system = without_taken(system, rules, taken)
    messages = list(conversation.messages)
    for place, message in enumerate(messages):
        if message.role != "system":
            break
        messages[place] = without_taken(message, rules, taken)
    if not taken:
        return conversation
    applied = list(conversation.applied)
    for target, put, at in (
        (Target.FIRST_MESSAGE, _with_note_first, first),
        (Target.LAST_MESSAGE, _with_note_last, last),
    ):
        moved = [piece for piece in taken if piece.rule.target is target]
        if moved and at is not None:
            path = messages[at].path
            messages[at] = put(messages[at], _note(moved, path))
            applied += [_applied(piece, path) for piece in moved]
    applied += [_applied(piece, None) for piece in taken if piece.rule.target is Target.NOWHERE]
    return replace(conversation, system=system, messages=tuple(messages), applied=tuple(applied))


def without_taken(message: Message, rules: Sequence[PromptRule], taken: list[TakenText]) -> Message:
    """The message without what rules take out of its texts, which is appended to `taken`.

    Of a text that is nothing else, the breakpoint stays.
    """
    parts: list[Part] = []
    for part in message.parts:
        if not isinstance(part, TextPart):
            parts.append(part)
            continue
        before = len(taken)
        lines: list[Line] = []
        for line in part.lines:
            if isinstance(line, str):
                text, pieces = take_out(line, rules)
                taken += [TakenText(rule, part.path, piece) for rule, piece in pieces]
                if text or not pieces:
                    lines.append(text)
            else:
                lines.append(line)
        if len(taken) > before and not lines:
            parts.append(HiddenPart(part.path, part.ttl_s))
        else:
            parts.append(replace(part, lines=tuple(lines)))
    return replace(message, parts=tuple(parts))


def left_out(taken: Sequence[TakenText]) -> tuple[AppliedRule, ...]:
    """What is reported of texts that go nowhere."""
    return tuple(_applied(piece, None) for piece in taken)


def _applied(taken: TakenText, target: str | None) -> AppliedRule:
    return AppliedRule(taken.rule.name, taken.path, target, len(taken.text))


def _first_question(messages: Sequence[Message]) -> int | None:
    """The first message of the user that has text."""
    places = (
        place
        for place, message in enumerate(messages)
        if message.role == "user" and any(isinstance(part, TextPart) for part in message.parts)
    )
    return next(places, None)


def _last_input(messages: Sequence[Message]) -> int | None:
    """The last message of the user or of a tool that can take text."""
    places = (
        place
        for place in reversed(range(len(messages)))
        if messages[place].role in ("user", "tool")
        and messages[place].parts
        and isinstance(messages[place].parts[-1], TextPart | ResultPart)
    )
    return next(places, None)


def _note(taken: Sequence[TakenText], path: str) -> TextPart:
    """Texts as a part of the message at `path`."""
    return TextPart(f"{path}.moved:{taken[0].path}", ("\n".join(piece.text for piece in taken),))


def _with_note_first(message: Message, note: TextPart) -> Message:
    """The note, an empty line, and what the message has."""
    return replace(message, parts=(replace(note, lines=(*note.lines, "")), *message.parts))


def _with_note_last(message: Message, note: TextPart) -> Message:
    """What the message has, an empty line, and the note; inside of a result that is the last part."""
    note = replace(note, lines=("", *note.lines))
    *earlier, last = message.parts
    if isinstance(last, ResultPart):
        return replace(message, parts=(*earlier, replace(last, texts=(*last.texts, note))))
    return replace(message, parts=(*message.parts, note))
