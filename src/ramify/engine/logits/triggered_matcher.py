"""`TriggeredMatcher`: follows an answer that is free text until a trigger, as before a tool call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from ramify.engine.logits.banned_sequences import without_tokens
from ramify.engine.logits.grammar_matcher import (
    dead_end_reason,
    has_token,
    is_complete,
    next_mask,
    panic_is_dead_end,
)
from ramify.engine.logits.logits_processors import TokenBitmask
from ramify.errors import DeadEndError
from ramify.params import FreeText, Mark

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# Text is compared as bytes, a character each; special token t is chr(0x1000 + t).
_FIRST_SPECIAL = 0x1000
MAX_TAIL_MASKS = 64  # of a grammar; most are None


class TokenTexts:
    """The bytes of each token of a vocabulary as a string, and which tokens are special."""

    def __init__(
        self, tokenizer: LLTokenizer, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        from llguidance import LLMatcher

        self.vocab_size = vocab_size
        num_texts = min(vocab_size, tokenizer.vocab_size)
        is_special = np.ones(vocab_size, bool)  # ids beyond the tokenizer's have no text
        is_special[:num_texts] = [tokenizer.is_special_token(token) for token in range(num_texts)]
        is_special[[token for token in eos_token_ids if token < vocab_size]] = True
        is_end = np.zeros(vocab_size, bool)
        is_end[[token for token in eos_token_ids if token < vocab_size]] = True
        self.special: TokenBitmask = np.packbits(is_special, bitorder="little")
        # Special tokens, and those that are no text by themselves: parts of characters.
        any_text = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(r"start: /(.|\n)*/"))
        self.not_text = ~next_mask(any_text, vocab_size) | self.special
        self.all: TokenBitmask = np.packbits(np.ones(vocab_size, bool), bitorder="little")
        self.end: TokenBitmask = np.packbits(is_end, bitorder="little")
        self.not_text &= self.all
        self._texts = [
            chr(_FIRST_SPECIAL + token)
            if is_special[token]
            else tokenizer.decode_bytes([token]).decode("latin-1")
            for token in range(num_texts)
        ]

    def of(self, token: int) -> str:
        """The text of one token."""
        return self._texts[token] if token < len(self._texts) else chr(_FIRST_SPECIAL + token)

    def completing(self, marks: Sequence[str]) -> dict[int, str]:
        """The texts of the tokens that one of these marks may end in, by token."""
        last_chars = frozenset(mark[-1] for mark in marks)
        ends = tuple(mark[begin:] for mark in marks for begin in range(len(mark)))
        return {
            token: text
            for token, text in enumerate(self._texts)
            if not last_chars.isdisjoint(text)
            and (text.startswith(ends) or any(mark in text for mark in marks))
        }

    def of_mark(self, mark: Mark) -> str:
        """The text of a mark, in the same form."""
        return "".join(
            self.of(part) if isinstance(part, int) else part.encode().decode("latin-1")
            for part in mark
        )


class MarkFinder:
    """Finds marks in a text that grows token by token."""

    def __init__(self, marks: Sequence[str]) -> None:
        self._marks = tuple(marks)
        self._first_chars = frozenset(mark[0] for mark in marks)

    def find(self, text: str) -> tuple[int, int] | None:
        """Index of the mark that begins first, and its end in the text; None if there is none."""
        if self._first_chars.isdisjoint(text):
            return None
        matches = [
            (begin, index)
            for index, mark in enumerate(self._marks)
            if (begin := text.find(mark)) >= 0
        ]
        if not matches:
            return None
        begin, index = min(matches)
        return index, begin + len(self._marks[index])

    def partial_len(self, text: str) -> int:
        """Length of the longest end of the text that a mark begins with."""
        if self._first_chars.isdisjoint(text):
            return 0
        return max((partial_len(text, mark) for mark in self._marks), default=0)


def partial_len(text: str, mark: str) -> int:
    """Length of the longest proper prefix of `mark` that `text` ends with."""
    longest = min(len(text), len(mark) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(mark[:size])), 0)


@dataclass(frozen=True, slots=True, eq=False)
class TriggeredGrammar:
    """A compiled grammar, and where an answer begins to follow it."""

    start: LLMatcher
    texts: TokenTexts
    free_text: FreeText
    finder: MarkFinder  # of the triggers, then the begins of what is ignored
    ignored_end: MarkFinder
    first_mask: TokenBitmask | None  # before any text; None: every token is allowed
    # The tokens that a forbidden trigger may end in, with their texts.
    trigger_ends: Mapping[int, str]
    # Tail of the text → mask. Computing one takes milliseconds.
    tail_masks: dict[str, TokenBitmask | None] = field(default_factory=dict)

    @classmethod
    def of(
        cls, start: LLMatcher, start_mask: TokenBitmask, texts: TokenTexts, free_text: FreeText
    ) -> TriggeredGrammar:
        """A grammar whose matcher `start` allows `start_mask` first."""
        begins, ends = free_text.ignored
        triggers = [texts.of_mark(mark) for mark in free_text.triggers]
        finder = MarkFinder([*triggers, *map(texts.of_mark, begins)])
        ignored_end = MarkFinder([texts.of_mark(mark) for mark in ends])
        grammar = cls(start, texts, free_text, finder, ignored_end, None, {})
        if free_text.forbids_triggers:
            grammar = replace(grammar, trigger_ends=texts.completing(triggers))
            return replace(grammar, first_mask=grammar.mask_without_triggers(""))
        # Only a token that contains a text trigger and more could be wrong as the first.
        is_free = all(isinstance(mark[0], int) for mark in free_text.triggers)
        if is_free or free_text.begins_after:
            start_mask = texts.all
        return replace(grammar, first_mask=grammar.free_mask(start_mask))

    def free_mask(self, grammar_mask: TokenBitmask) -> TokenBitmask | None:
        """The mask of free text, whose tokens need not be text; None if that is all tokens."""
        mask = np.bitwise_or(grammar_mask, self.texts.not_text)
        if self.free_text.must_trigger:
            mask &= ~self.texts.end
        return None if np.array_equal(mask, self.texts.all) else mask

    def mask_after(self, tail: str, tokens: Sequence[int]) -> TokenBitmask | None:
        """The mask of free text that ends with `tail`, which may begin a trigger.

        Args:
            tokens: in which the tail lies; text before it changes nothing.
        """
        if tail not in self.tail_masks:
            if self.free_text.forbids_triggers:
                mask = self.mask_without_triggers(tail)
            else:
                mask = self.free_mask(self._grammar_mask(tokens))
            if len(self.tail_masks) >= MAX_TAIL_MASKS:
                self.tail_masks.clear()
            self.tail_masks[tail] = mask
        return self.tail_masks[tail]

    def mask_without_triggers(self, tail: str) -> TokenBitmask | None:
        """The mask of tokens that complete no trigger after `tail`; None if that is all tokens."""
        find = self.finder.find
        completing = [token for token, text in self.trigger_ends.items() if find(tail + text)]
        return without_tokens(self.texts.all, completing) if completing else None

    def _grammar_mask(self, tokens: Sequence[int]) -> TokenBitmask:
        matcher = self.start.deep_copy()
        # The tokens may begin the mark of what is ignored instead, which is no part of the grammar.
        if not matcher.consume_tokens(list(tokens)):
            return self.texts.all
        return next_mask(matcher, self.texts.vocab_size)


class TriggeredMatcher:
    """The state of one answer; each call catches up with the output it is given.

    Free text costs a search for marks in each new token: no mask is computed unless the text ends
    with the beginning of a trigger.
    """

    def __init__(self, grammar: TriggeredGrammar) -> None:
        self._grammar, self._state = grammar, _State(grammar)
        self._num_known: int | None = 0  # output tokens consumed; None while that changes

    @panic_is_dead_end
    def advance(self, output_ids: Sequence[int]) -> bool:
        """See `ramify.engine.logits.logits_processors.GrammarMatcher`."""
        num_known, self._num_known = self._num_known, None
        if num_known is None or num_known > len(output_ids):
            self._state, num_known = _State(self._grammar), 0
        for token in output_ids[num_known:]:
            if not self._state.consume(token):
                raise DeadEndError(len(output_ids), self._state.reason)
        mask = None if self._state.is_complete else self._state.mask()
        if mask is not None and not mask.any():
            raise DeadEndError(len(output_ids), self._state.reason)
        self._num_known = len(output_ids)
        return self._state.is_complete

    @panic_is_dead_end
    def token_bitmasks(
        self, output_ids: Sequence[int], draft: Sequence[int]
    ) -> list[TokenBitmask | None]:
        """See `ramify.engine.logits.logits_processors.GrammarMatcher`."""
        self.advance(output_ids)
        masks = [self._state.mask()]
        state = self._state.copy() if draft else self._state
        for token in draft:
            last = masks[-1]
            if (last is not None and not has_token(last, token)) or not state.consume(token):
                break
            if state.is_complete:
                break
            mask = state.mask()
            if mask is not None and not mask.any():
                break
            masks.append(mask)
        return masks


class _State:
    """Where an answer is: in free text, in an ignored part, or in its grammar."""

    def __init__(self, grammar: TriggeredGrammar) -> None:
        self._grammar = grammar
        self._matcher: LLMatcher | None = None  # in the grammar
        self._is_ignored = grammar.free_text.starts_ignored
        self._tail = ""  # the end of the text, where it may begin a mark
        self._tail_tokens: tuple[int, ...] = ()  # from the one on in which the tail begins
        self._mask: TokenBitmask | None = None
        self._has_mask = False

    def copy(self) -> _State:
        """The same state, independent of this one."""
        state = _State(self._grammar)
        state._matcher = None if self._matcher is None else self._matcher.deep_copy()
        state._is_ignored, state._tail = self._is_ignored, self._tail
        state._tail_tokens = self._tail_tokens
        state._mask, state._has_mask = self._mask, self._has_mask
        return state

    @property
    def is_complete(self) -> bool:
        """Whether the answer ends here, because its grammar does."""
        return self._matcher is not None and is_complete(self._matcher)

    @property
    def reason(self) -> str:
        """The reason why no token is allowed next."""
        default = "the format does not allow the last"
        return default if self._matcher is None else dead_end_reason(self._matcher, default)

    def mask(self) -> TokenBitmask | None:
        """Tokens allowed next; None: all."""
        if not self._has_mask:
            self._mask, self._has_mask = self._compute_mask(), True
        return self._mask

    def _compute_mask(self) -> TokenBitmask | None:
        grammar = self._grammar
        if self._matcher is not None:
            return next_mask(self._matcher, grammar.texts.vocab_size)
        if self._is_ignored or grammar.free_text.begins_after:
            return grammar.free_mask(grammar.texts.all)
        if not self._tail:
            return grammar.first_mask
        return grammar.mask_after(self._tail, self._tail_tokens)

    def consume(self, token: int) -> bool:
        """Append a token; returns whether it was allowed."""
        self._has_mask = False
        if self._matcher is None:
            return self._consume_free(token)
        if not self._matcher.consume_token(token):
            return False
        self._resume(token)
        return True

    def _resume(self, token: int) -> None:
        """Go back to free text where the grammar may end with this token, if it `resumes`."""
        matcher = self._matcher
        if self._grammar.free_text.resumes and matcher is not None and matcher.is_accepting():
            self._matcher = None
            self._set_tail(self._grammar.finder, self._grammar.texts.of(token), (token,))

    def _consume_free(self, token: int) -> bool:
        grammar = self._grammar
        text = self._tail + grammar.texts.of(token)
        tokens = (*self._tail_tokens, token)
        while True:
            finder = grammar.ignored_end if self._is_ignored else grammar.finder
            match = finder.find(text)
            if match is None:
                self._set_tail(finder, text, tokens)
                return True
            index, end = match
            if grammar.free_text.forbids_triggers:
                return False
            if not self._is_ignored and index < len(grammar.free_text.triggers):
                self._begin(tokens)
                return True
            self._is_ignored = not self._is_ignored
            text, tokens = text[end:], (token,)

    def _set_tail(self, finder: MarkFinder, text: str, tokens: tuple[int, ...]) -> None:
        tail_len = finder.partial_len(text)
        self._tail = text[len(text) - tail_len :]
        # Keep the tokens that the tail lies in.
        num_kept, num_chars = 0, 0
        while num_chars < tail_len:
            num_kept += 1
            num_chars += len(self._grammar.texts.of(tokens[-num_kept]))
        self._tail_tokens = tokens[len(tokens) - num_kept :]

    def _begin(self, tokens: tuple[int, ...]) -> None:
        """Enter the grammar with the tokens in which a trigger lies.

        If the grammar cannot begin with them, the text goes on free: it had another meaning.
        """
        matcher = self._grammar.start.deep_copy()
        self._tail, self._tail_tokens = "", ()
        if self._grammar.free_text.begins_after:
            self._matcher = matcher
        elif matcher.consume_tokens(list(tokens)):
            self._matcher = matcher
            self._resume(tokens[-1])
