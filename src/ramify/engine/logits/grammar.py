"""Structured output: compiles grammars with llguidance, and follows one token by token."""

from __future__ import annotations

import atexit
import json
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ramify.engine.logits.logits_processors import TokenBitmask
from ramify.errors import DeadEndError, InvalidParamsError
from ramify.params import StructuredOutput

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# Whitespace between JSON tokens: enough for pretty printing, but bounded, because some models would
# write it for ever.
JSON_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,64}"
COMPILE_S = 1.0  # a grammar that takes longer is refused; 1,000 properties take 0.7 s
MAX_COMPILING = 2  # threads at once, including those past their deadline
EXIT_S = 10.0  # at exit, the most to wait for threads that compile
MAX_CACHED = 256  # compiled grammars, including refused ones


class _CompileThreads:
    """Threads that compile; joined at exit, because one that outlives the interpreter crashes it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._started = weakref.WeakSet[threading.Thread]()
        self._is_over = False

    def start(self, worker: threading.Thread) -> bool:
        """Start a thread, unless the program is ending; returns whether it was started."""
        with self._lock:
            if not self._is_over:
                worker.start()
                self._started.add(worker)
            return not self._is_over

    def finish(self) -> None:
        """At exit: start no more threads, and wait up to `EXIT_S` seconds for the running ones."""
        with self._lock:
            self._is_over = True
            workers = list(self._started)
        deadline = time.monotonic() + EXIT_S
        for worker in workers:
            worker.join(max(0.0, deadline - time.monotonic()))


_compile_threads = _CompileThreads()
atexit.register(_compile_threads.finish)


class LlguidanceMatcher:
    """The state of one answer in its grammar; each call catches up with the output it is given.

    Args:
        start: the matcher before the first token; copied, never changed.
        start_mask: tokens allowed first.
    """

    def __init__(self, start: LLMatcher, start_mask: TokenBitmask, vocab_size: int) -> None:
        self._start, self._matcher, self._vocab_size = start, start.deep_copy(), vocab_size
        self._num_known: int | None = 0  # output tokens consumed; None while that changes
        self._start_mask = self._mask = start_mask

    def advance(self, output_ids: Sequence[int]) -> bool:
        """See `ramify.engine.logits.logits_processors.GrammarMatcher`."""
        if self._num_known == len(output_ids):
            return self._num_known > 0 and self._is_complete
        num_known, self._num_known = self._num_known, None
        # A call was cut off, or the output has become shorter: begin again.
        if num_known is None or num_known > len(output_ids):
            self._matcher, num_known = self._start.deep_copy(), 0
        new = list(output_ids[num_known:])
        if new and not self._matcher.consume_tokens(new):
            raise DeadEndError(len(output_ids), self._reason("the format does not allow the last"))
        if not self._is_complete:
            self._mask = self._next_mask() if output_ids else self._start_mask
            if self._matcher.is_error() or not self._mask.any():
                raise DeadEndError(len(output_ids), self._reason("the format has no such text"))
        self._num_known = len(output_ids)
        return bool(new) and self._is_complete

    def token_bitmasks(self, output_ids: Sequence[int], draft: Sequence[int]) -> list[TokenBitmask]:
        """See `ramify.engine.logits.logits_processors.GrammarMatcher`."""
        masks = [self._next_mask() if self.advance(output_ids) else self._mask]
        num_known, self._num_known = self._num_known, None
        num_consumed = 0
        for token in draft:
            if not _has(masks[-1], token) or not self._matcher.consume_token(token):
                break
            num_consumed += 1
            if self._is_complete:
                break  # complete: no token can follow
            mask = self._next_mask()
            if self._matcher.is_error() or not mask.any():
                break
            masks.append(mask)
        if not self._matcher.is_error() and (
            not num_consumed or self._matcher.rollback(num_consumed)
        ):
            self._num_known = num_known
        return masks

    @property
    def _is_complete(self) -> bool:
        return self._matcher.is_stopped() and self._matcher.is_accepting()

    def _next_mask(self) -> TokenBitmask:
        return _mask(self._matcher, self._vocab_size)

    def _reason(self, default: str) -> str:
        limits = {"ParserTooComplex", "LexerTooComplex"}
        if self._matcher.stop_reason() in limits:
            return "the format needs more work per token than is allowed"
        if self._matcher.stop_reason() == "InternalError":
            return f"the format's parser gave up ({_shortened(self._matcher.get_error().splitlines()[0])})"
        return default


def _mask(matcher: LLMatcher, vocab_size: int) -> TokenBitmask:
    """Tokens allowed next, as the model counts ids; the tokenizer may have fewer or more."""
    bitmask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    mask = np.zeros(-(-vocab_size // 8), np.uint8)
    num_bytes = min(len(mask), len(bitmask))
    mask[:num_bytes] = bitmask[:num_bytes]
    if vocab_size % 8:
        mask[-1] &= (1 << vocab_size % 8) - 1
    return mask


def _has(mask: TokenBitmask, token: int) -> bool:
    return bool(mask[token // 8] >> (token % 8) & 1)


class GrammarCompiler:
    """Compiles and caches grammars for one tokenizer. Thread-safe.

    Args:
        tokenizer_json: returns the text of `tokenizer.json`; called once, for the first grammar.
        vocab_size: of the model, which may have more ids than the tokenizer.
        eos_token_ids: tokens that end an output; allowed where the grammar may end.
    """

    def __init__(
        self,
        tokenizer_json: Callable[[], str],
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int],
    ) -> None:
        self._tokenizer_json = tokenizer_json
        self._vocab_size, self._eos_token_ids = vocab_size, sorted(eos_token_ids)
        self._tokenizer: LLTokenizer | None = None
        self._lock, self._loading = threading.Lock(), threading.Lock()
        self._cache: OrderedDict[StructuredOutput, _CompiledGrammar] = OrderedDict()
        self._permits = threading.Semaphore(MAX_COMPILING)

    def compile(self, spec: StructuredOutput) -> LlguidanceMatcher:
        """A matcher for one answer, before its first token.

        Takes up to `COMPILE_S` seconds for a new grammar; the first one also reads the tokenizer,
        seconds for a large vocabulary. `AsyncLLM` calls it in another thread before the engine
        thread does, which then finds the grammar cached.

        Raises:
            InvalidParamsError: the grammar is malformed, allows no text, or is too much work; or
                llguidance is not installed.
        """
        with self._lock:
            compiled = self._cache.get(spec)
            if compiled is not None:
                self._cache.move_to_end(spec)
        if compiled is None:
            with self._loading:
                tokenizer = self._load_tokenizer()
            compiled = self._compile(spec, tokenizer)
        return compiled.matcher()

    def _load_tokenizer(self) -> LLTokenizer:
        if self._tokenizer is None:
            try:
                from llguidance import LLTokenizer
            except ImportError:
                raise InvalidParamsError(
                    "structured",
                    "given",
                    "None, because llguidance is not installed: pip install 'ramify[structured]'",
                ) from None
            try:
                self._tokenizer = LLTokenizer(
                    self._tokenizer_json(), eos_token=self._eos_token_ids or None
                )
            except ValueError as error:
                raise InvalidParamsError(
                    "structured",
                    "given",
                    f"None: llguidance cannot use this model's tokenizer ({error})",
                ) from None
        return self._tokenizer

    def _compile(self, spec: StructuredOutput, tokenizer: LLTokenizer) -> _CompiledGrammar:
        """Compile in a thread of its own, because llguidance cannot be stopped, only abandoned."""
        deadline = time.monotonic() + COMPILE_S
        if not self._permits.acquire(timeout=COMPILE_S):
            raise InvalidParamsError(
                "structured", "given", "sent later: other grammars are still being compiled"
            )
        compiled = _CompiledGrammar(spec, self._vocab_size)

        def work() -> None:
            try:
                compiled.run(tokenizer)
            finally:
                with self._lock:
                    self._store(spec, compiled)
                self._permits.release()

        worker = threading.Thread(target=work, name="ramify-format", daemon=True)
        try:
            is_started = _compile_threads.start(worker)
        except RuntimeError:  # no more threads
            is_started = False
        if not is_started:
            self._permits.release()
            raise InvalidParamsError(
                "structured",
                "given",
                "None: no thread can be started to compile it, or the program is ending",
            )
        worker.join(max(0.0, deadline - time.monotonic()))
        with self._lock:
            if spec not in self._cache:  # refuse it until the thread has compiled it
                late = _CompiledGrammar(spec, self._vocab_size)
                late.fault = f"simpler: it takes more than {COMPILE_S:g} s to compile"
                self._store(spec, late)
            return self._cache[spec]

    def _store(self, spec: StructuredOutput, compiled: _CompiledGrammar) -> None:
        self._cache[spec] = compiled
        while len(self._cache) > MAX_CACHED:
            self._cache.popitem(last=False)


class _CompiledGrammar:
    """The matcher of a grammar before the first token, or why there is none."""

    def __init__(self, spec: StructuredOutput, vocab_size: int) -> None:
        self.spec, self.vocab_size = spec, vocab_size
        self.start: LLMatcher | None = None
        self.mask: TokenBitmask = np.zeros(0, np.uint8)
        self.fault = "another one: its parser gave up"  # unless `run` sets a better reason

    def run(self, tokenizer: LLTokenizer) -> None:
        """Compile; sets `start` and `mask`, or `fault`."""
        from llguidance import LLMatcher, LLParserLimits

        try:
            grammar = _grammar(self.spec)
        except Exception as error:  # noqa: BLE001 - foreign parsers; the error goes to the user
            self.fault = f"well-formed, but: {_shortened(error)}"
            return
        # In llguidance's own units: about 20 ms to build a lexer, then 15 ms of lexing and 3 ms of
        # parsing per token (by its documentation). A lexer state takes 1 to 2 kB.
        limits = LLParserLimits(
            initial_lexer_fuel=1_000_000,
            step_lexer_fuel=200_000,
            step_max_items=50_000,
            max_lexer_states=50_000,
            max_grammar_size=200_000,
            verbose_errors=False,
        )
        start = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        if not start.is_error():
            self.mask = _mask(start, self.vocab_size)
        if start.is_error():
            reason = start.get_error().splitlines()[0]
            if reason.startswith("NoExtension"):
                reason = "no text satisfies it"
            self.fault = f"possible to follow, but: {_shortened(reason)}"
        elif not self.mask.any():
            self.fault = "possible to follow, but: no text satisfies it"
        else:
            self.start = start

    def matcher(self) -> LlguidanceMatcher:
        """A new matcher. Raises InvalidParamsError if the grammar was refused."""
        if self.start is None:
            name = next(name for name in self.spec.__slots__ if getattr(self.spec, name))
            raise InvalidParamsError(name, _shortened(getattr(self.spec, name)), self.fault)
        return LlguidanceMatcher(self.start, self.mask, self.vocab_size)


def _grammar(spec: StructuredOutput) -> Any:
    """The grammar in llguidance's own form."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    options: Any = {"whitespace_pattern": JSON_WHITESPACE}
    if spec.json_object:
        return LLMatcher.grammar_from_json_schema('{"type": "object"}', defaults=options)
    if spec.json_schema is not None:
        return LLMatcher.grammar_from_json_schema(str(spec.json_schema), defaults=options)
    if spec.regex is not None:
        return LLMatcher.grammar_from_regex(spec.regex)
    if spec.grammar is not None:
        return LLMatcher.grammar_from_lark(any_to_lark(spec.grammar))
    choices = " | ".join(json.dumps(text, ensure_ascii=False) for text in spec.choice or ())
    # One terminal: as rules, each text would be a parser item, and `step_max_items` limits those.
    return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}")


def _shortened(value: object) -> str:
    text = str(value)
    return text if len(text) <= 200 else f"{text[:197]}..."
