"""`Transcript`: the messages or text of a session so far, and their token ids."""

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
    """A length of a session to go back to."""

    num_tokens: int  # of a plain session
    num_messages: int  # of a conversation


@dataclass(frozen=True, slots=True)
class _TokenSpan:
    """A part of the rendered conversation and its ids: written by the template, or generated."""

    text: str
    ids: array[int]
    is_generated: bool


class Transcript:
    """Token ids of a plain session; messages and computed token ids of a conversation.

    A conversation is rendered anew, as a whole, for each turn. Token ids are reused for the longest
    beginning of that text that was rendered or generated before, so generated ids stay as the model
    gave them. Where the template renders an answer differently from what was generated (it drops
    thinking, or text after a stop string), everything from that answer on is tokenised again. The
    other ids are those of the whole text tokenised at once, if the template ends each answer with a
    special token.
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
        # (number of messages, spans) after each answer
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
    def messages(self) -> list[Message]:
        """Copies of the messages, answers included; [] in a plain session."""
        return [dict(message) for message in self._messages or ()]

    @property
    def token_ids(self) -> array[int]:
        """All token ids; in a conversation, those computed, up to the last answer."""
        if self._messages is None:
            return self._ids[:]
        return _joined(self._answers[-1][1] if self._answers else ())

    def append(self, more: Prompt | Message | Sequence[Message]) -> None:
        """See `Session.append`."""
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
        """Token ids of the next prompt.

        Raises:
            RequestError: the session is empty, or the template refuses the messages.
        """
        if self._messages is None:
            if not self._ids:
                raise EmptyPromptError
            return self._ids[:]
        assert self._tokenizer is not None
        text = self._tokenizer.render_chat(self._messages, **self._options)
        spans, end = self._reusable_spans(text)
        if end < len(text):
            # A token may cross the end of template text, so only a generated span can be kept.
            while spans and not spans[-1].is_generated:
                end -= len(spans.pop().text)
            last = spans[-1].ids[-1] if spans else None
            spans.append(_TokenSpan(text[end:], self._encode_after(last, text[end:]), False))
        self._spans = spans
        return _joined(spans)

    def add_answer(self, output: RequestOutput) -> None:
        """Add the answer to the prompt that `prompt_ids` returned last."""
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
        """The present length, for `rollback`."""
        return Savepoint(len(self._ids), len(self._messages or ()))

    def rollback(self, to: Savepoint | int) -> None:
        """See `Session.rollback`."""
        items: array[int] | list[Message] = self._ids if self._messages is None else self._messages
        if isinstance(to, Savepoint):
            keep = to.num_tokens if self._messages is None else to.num_messages
        elif isinstance(to, int) and not isinstance(to, bool):
            keep = len(items) - to
        else:
            raise InvalidParamsError(
                "to", to, "the result of mark(), or a number of tokens or messages"
            )
        if not 0 <= keep <= len(items):
            what = "tokens" if self._messages is None else "messages"
            raise InvalidParamsError("to", to, f"within the {len(items)} {what} of the session")
        del items[keep:]
        while self._answers and self._answers[-1][0] > keep:
            self._answers.pop()

    def copy(self) -> Transcript:
        """An independent copy."""
        twin = Transcript(self._tokenizer, template_options=self._options)
        twin._messages = None if self._messages is None else self.messages
        twin._ids, twin._spans = self._ids[:], list(self._spans)
        twin._answers = list(self._answers)
        return twin

    def _add_messages(self, messages: Sequence[Message]) -> None:
        assert self._messages is not None
        if not isinstance(messages, list | tuple) or not all(
            isinstance(message, Mapping) for message in messages
        ):
            raise InvalidParamsError(
                "messages", messages, "a list of mappings with role and content"
            )
        self._messages += [dict(message) for message in messages]

    def _reusable_spans(self, text: str) -> tuple[list[_TokenSpan], int]:
        """The spans that `text` begins with, and the character at which they end."""
        reusable: list[_TokenSpan] = []
        end = 0
        for span in self._spans:
            if text.startswith(span.text, end):
                reusable.append(span)
                end += len(span.text)
                continue
            if span.is_generated:
                stripped = self._strip_end_tokens(span)
                if stripped.ids and text.startswith(stripped.text, end):
                    reusable.append(stripped)
                    end += len(stripped.text)
            break
        return reusable, end

    def _strip_end_tokens(self, span: _TokenSpan) -> _TokenSpan:
        """A generated span without special tokens at its end, where the template may write others."""
        assert self._tokenizer is not None
        special, size = self._tokenizer.special_token_ids, len(span.ids)
        while size and span.ids[size - 1] in special:
            size -= 1
        ids = span.ids[:size]
        return _TokenSpan(self._tokenizer.decode(ids, skip_special_tokens=False), ids, True)

    def _encode_after(self, last: int | None, text: str) -> array[int]:
        """Ids of a text that follows the token `last`.

        A special token is encoded along with the text, as it may take in space; its id is dropped.
        """
        assert self._tokenizer is not None
        if last in self._tokenizer.special_token_ids:
            special = self._tokenizer.decode([last], skip_special_tokens=False)
            ids, _ = self._tokenizer.encode_with_offsets(special + text)
            if ids[0] == last:
                return ids[1:]
        return self._tokenizer.encode_with_offsets(text)[0]


def _joined(spans: Sequence[_TokenSpan]) -> array[int]:
    return array("i", chain.from_iterable(span.ids for span in spans))


def _integers(ids: Sequence[int]) -> array[int]:
    try:
        if isinstance(ids, bytes | bytearray):  # `array` would read them as raw memory
            raise TypeError("bytes")
        return array("i", ids)
    except (TypeError, OverflowError) as error:
        raise InvalidParamsError("prompt", ids, "text or a sequence of token ids") from error
