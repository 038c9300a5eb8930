"""What a session has said so far, as token ids that are never made twice."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from ramify.engine.text.prompt_inputs import Message, Prompt, encode
from ramify.errors import ChatTemplateError, EmptyPromptError, InvalidParamsError
from ramify.outputs import RequestOutput

if TYPE_CHECKING:
    from ramify.engine.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Savepoint:
    """A point in a session to go back to."""

    num_tokens: int  # of a plain one
    num_messages: int  # of a conversation


@dataclass(frozen=True, slots=True)
class _TokenSpan:
    """A part of the rendered conversation with its ids: as the template wrote it, or generated."""

    text: str
    ids: array[int]
    is_generated: bool


class Transcript:
    """A plain one is token ids; a conversation is messages, and the ids that were computed.

    A conversation is rendered by the template anew each time, all of it, and the text that the
    model gets is exactly that. What is kept are ids: of the longest beginning that was rendered,
    or generated, before. So generated ids stay as the model gave them. Where the template renders
    an answer otherwise than it was generated (thinking that it drops, text behind a stop text),
    everything from that answer on is tokenised again. Ids that no model has generated are those of
    the whole text tokenised at once, if the template ends answers with a special token.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        begin: Prompt = "",
        messages: Sequence[Message] | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._tokenizer, self._options = tokenizer, dict(template_options or {})
        self._messages: list[Message] | None = None if messages is None else []
        self._ids = array("i")
        self._spans: list[_TokenSpan] = []
        # messages up to each answer, and the pieces that had been computed then
        self._answers: list[tuple[int, tuple[_TokenSpan, ...]]] = []
        if messages is not None:
            if tokenizer is None or not tokenizer.has_chat_template:
                raise ChatTemplateError(
                    "the model has no chat template; begin a plain session with a text or ids"
                )
            self._add_messages(messages)
        elif not isinstance(begin, str) or begin:
            self.append(begin)

    @property
    def is_chat(self) -> bool:
        """Whether it is a conversation."""
        return self._messages is not None

    @property
    def messages(self) -> list[Message]:
        """The messages of a conversation, answers included; none of a plain one."""
        return [dict(one) for one in self._messages or ()]

    @property
    def token_ids(self) -> array[int]:
        """All ids; of a conversation, those that were computed, up to the last answer."""
        if not self.is_chat:
            return self._ids[:]
        return _joined(self._answers[-1][1] if self._answers else ())

    def append(self, more: Prompt | Message | Sequence[Message]) -> None:
        """Say something; see `Session.append`."""
        given: Any = more
        if self._messages is None:
            if isinstance(given, str) and len(self._ids) and self._tokenizer is not None:
                new: Sequence[int] = self._tokenizer.encode(given, add_special_tokens=False)
            else:
                new = encode(given, self._tokenizer)
            self._ids.extend(_integers(new))
        elif isinstance(given, str):
            self._messages.append({"role": "user", "content": given})
        else:
            self._add_messages([given] if isinstance(given, Mapping) else given)

    def prompt_ids(self) -> array[int]:
        """What is to be computed for the next answer.

        Raises:
            RequestError: nothing was said, or the template refuses the messages.
        """
        if self._messages is None:
            if not self._ids:
                raise EmptyPromptError
            return self._ids[:]
        assert self._tokenizer is not None
        text = self._tokenizer.apply_chat_template(
            self._tokenizer.escape_special_tokens(self._messages),
            add_generation_prompt=True,
            **self._tokenizer.escape_special_tokens(self._options),
        )
        kept, at = self._reusable_spans(text)
        if at < len(text):
            while kept and not kept[-1].is_generated:  # tokens may go across its end
                at -= len(kept.pop().text)
            last = kept[-1].ids[-1] if kept else None
            kept.append(_TokenSpan(text[at:], self._encode_after(last, text[at:]), False))
        self._spans = kept
        return _joined(kept)

    def add_answer(self, output: RequestOutput) -> None:
        """Add the answer to what `prompt_ids` gave."""
        ids = array("i", output.token_ids)
        if self._messages is None:
            self._ids.extend(ids)
            return
        assert self._tokenizer is not None
        text = self._tokenizer.decode(ids, skip_special_tokens=False)
        self._spans.append(_TokenSpan(text, ids, True))
        self._messages.append({"role": "assistant", "content": output.text})
        self._answers.append((len(self._messages), tuple(self._spans)))

    def mark(self) -> Savepoint:
        """Where it is now."""
        return Savepoint(len(self._ids), len(self._messages or ()))

    def rollback(self, to: Savepoint | int) -> None:
        """Forget the end; see `Session.rollback`."""
        have: array[int] | list[Message] = self._ids if self._messages is None else self._messages
        if isinstance(to, Savepoint):
            keep = to.num_messages if self.is_chat else to.num_tokens
        elif isinstance(to, int) and not isinstance(to, bool):
            keep = len(have) - to
        else:
            raise InvalidParamsError("to", to, "a mark, or a number of tokens or messages")
        if not 0 <= keep <= len(have):
            what = "messages" if self.is_chat else "tokens"
            raise InvalidParamsError("to", to, f"within the {len(have)} {what} that there are")
        del have[keep:]
        while self.is_chat and self._answers and self._answers[-1][0] > keep:
            self._answers.pop()

    def copy(self) -> Transcript:
        """Another one that goes on from here."""
        twin = Transcript(self._tokenizer, template_options=self._options)
        twin._messages = None if self._messages is None else self.messages
        twin._ids, twin._spans = self._ids[:], list(self._spans)
        twin._answers = list(self._answers)
        return twin

    def _add_messages(self, messages: Sequence[Message]) -> None:
        assert self._messages is not None
        if not isinstance(messages, list | tuple) or not all(
            isinstance(one, Mapping) for one in messages
        ):
            raise InvalidParamsError(
                "messages", messages, "messages: mappings with role and content"
            )
        self._messages += [dict(one) for one in messages]

    def _reusable_spans(self, text: str) -> tuple[list[_TokenSpan], int]:
        """The pieces that a text begins with, and where they end in it."""
        kept: list[_TokenSpan] = []
        at = 0
        for piece in self._spans:
            if text.startswith(piece.text, at):
                kept.append(piece)
                at += len(piece.text)
                continue
            if piece.is_generated:
                shorter = self._strip_end_tokens(piece)
                if shorter.ids and text.startswith(shorter.text, at):
                    kept.append(shorter)
                    at += len(shorter.text)
            break
        return kept, at

    def _strip_end_tokens(self, span: _TokenSpan) -> _TokenSpan:
        """An answer without special tokens at its end: the template has its own way to end it."""
        assert self._tokenizer is not None
        special, size = self._tokenizer.special_token_ids, len(span.ids)
        while size and span.ids[size - 1] in special:
            size -= 1
        ids = span.ids[:size]
        return _TokenSpan(self._tokenizer.decode(ids, skip_special_tokens=False), ids, True)

    def _encode_after(self, last: int | None, text: str) -> array[int]:
        """Ids of a text that follows a token; a special one is tokenised along and left out."""
        assert self._tokenizer is not None
        if last in self._tokenizer.special_token_ids:
            border = self._tokenizer.decode([last], skip_special_tokens=False)
            ids, _ = self._tokenizer.encode_with_offsets(border + text)
            if ids[0] == last:
                return ids[1:]
        return self._tokenizer.encode_with_offsets(text)[0]


def _joined(spans: Sequence[_TokenSpan]) -> array[int]:
    return array("i", chain.from_iterable(piece.ids for piece in spans))


def _integers(ids: Sequence[int]) -> array[int]:
    try:
        if isinstance(ids, bytes | bytearray):  # which `array` would take as they are
            raise TypeError("bytes")
        return array("i", ids)
    except (TypeError, OverflowError) as error:
        raise InvalidParamsError("prompt", ids, "text or a sequence of token ids") from error
