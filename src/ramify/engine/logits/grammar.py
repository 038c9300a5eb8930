"""Structured output: compiles grammars with llguidance."""

from __future__ import annotations

import atexit
import json
import re
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ramify.engine.logits.grammar_cache import CompilePermits, GrammarCache
from ramify.engine.logits.grammar_matcher import LlguidanceMatcher, compile_reason, next_mask
from ramify.engine.logits.logits_processors import GrammarMatcher, TokenBitmask
from ramify.engine.logits.triggered_matcher import (
    TokenTexts,
    TriggeredGrammar,
    TriggeredMatcher,
)
from ramify.errors import (
    CompileBusyError,
    InvalidParamsError,
    LibraryPanicError,
    shortened,
)
from ramify.library_panics import panics_as_errors
from ramify.params import StructuredOutput

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# White space between two JSON tokens: one space, or a line break and an indentation. That is what
# `json.dumps(indent=…)` and its like write, 10 levels of 4 spaces deep, and all that a model can
# pad a token with: some would write white space for ever.
JSON_WHITESPACE = r"\x20|\r?\n[\x20\t]{0,40}"
# llguidance's options of a JSON schema: `oneOf` is read as `anyOf`, whose branches may overlap; any
# character may be escaped, as models do that learnt from ASCII JSON.
JSON_OPTIONS = {
    "whitespace_pattern": JSON_WHITESPACE,
    "coerce_one_of": True,
    "json_allow_general_unicode_escapes": True,
}
COMPILE_S = 1.0  # a grammar that takes longer is refused; 1,000 properties take 0.7 s
# A line with which grammars in Lark begin. llguidance's own test takes quadratic time in blank lines.
_LARK = re.compile(r"^[^\S\n]*(?:%llguidance\b|start[^\S\n]*:)", re.MULTILINE)
MAX_GBNF_RULES = 1000  # of a grammar: its translation takes quadratic time, 0.2 s for these
EXIT_S = 10.0  # at exit, the most to wait for threads that compile
# Of a thread that compiles: llguidance recurses along chains of rules and references, by up to 10 kB
# a level, and a stack overflow ends the process. `MAX_GRAMMAR_BYTES` has up to 30,000 levels. Only
# what is used takes memory.
STACK_BYTES = 512 << 20


class _CompileThreads:
    """Threads that compile, with large stacks.

    Joined at exit, because one that outlives the interpreter crashes it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._started = weakref.WeakSet[threading.Thread]()
        self._is_over = False

    def start(self, worker: threading.Thread) -> bool:
        """Start a thread, unless the program is ending; returns whether it was started."""
        with self._lock:
            if not self._is_over:
                others = threading.stack_size(STACK_BYTES)
                try:
                    worker.start()
                finally:
                    threading.stack_size(others)
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
        self._tokenizer_fault: str | None = None  # why there is none
        self._lock, self._loading = threading.Lock(), threading.Lock()
        self._token_texts: TokenTexts | None = None
        self._cache: GrammarCache[_CompiledGrammar] = GrammarCache()
        self._permits = CompilePermits()

    def compile(self, spec: StructuredOutput, tenant: str = "") -> GrammarMatcher:
        """A matcher for one answer, before its first token.

        Takes up to `COMPILE_S` seconds for a new grammar; the first one also reads the tokenizer,
        seconds for a large vocabulary. `AsyncLLM` calls it in another thread before the engine
        thread does, which then finds the grammar cached.

        Args:
            tenant: who asks; finds only grammars that the same tenant compiled.

        Raises:
            InvalidParamsError: the grammar is malformed, allows no text, or is too much work; or
                llguidance is not installed.
            CompileBusyError: no thread has become free in `COMPILE_S` seconds.
        """
        with self._lock:
            compiled = self._cache.get(tenant, spec)
        if compiled is None:
            with self._loading:
                tokenizer = self._load_tokenizer()
                if spec.free_text is not None and self._token_texts is None:
                    with panics_as_errors("llguidance"):
                        self._token_texts = TokenTexts(
                            tokenizer, self._vocab_size, self._eos_token_ids
                        )
            compiled = self._compile(spec, tenant, tokenizer)
        return compiled.matcher()

    def _load_tokenizer(self) -> LLTokenizer:
        if self._tokenizer is None and self._tokenizer_fault is None:
            try:
                from llguidance import LLTokenizer

                with panics_as_errors("llguidance"):
                    self._tokenizer = LLTokenizer(
                        self._tokenizer_json(), eos_token=self._eos_token_ids or None
                    )
            except ImportError:
                self._tokenizer_fault = (
                    "None: llguidance is not installed: pip install 'ramify[structured]'"
                )
            # It panics at a vocabulary with tokens that are too long.
            except (ValueError, LibraryPanicError) as error:
                reason = getattr(error, "reason", error)
                self._tokenizer_fault = (
                    f"None: llguidance cannot use this model's tokenizer ({shortened(reason)})"
                )
        if self._tokenizer is None:
            raise InvalidParamsError("structured", "given", str(self._tokenizer_fault))
        return self._tokenizer

    def _compile(
        self, spec: StructuredOutput, tenant: str, tokenizer: LLTokenizer
    ) -> _CompiledGrammar:
        """Compile in a thread of its own, because llguidance cannot be stopped, only abandoned."""
        deadline = time.monotonic() + COMPILE_S
        if not self._permits.acquire(tenant, COMPILE_S):
            raise CompileBusyError(COMPILE_S)
        compiled = _CompiledGrammar(spec, self._vocab_size, self._token_texts)

        def work() -> None:
            try:
                with panics_as_errors("llguidance"):
                    compiled.run(tokenizer)
            except LibraryPanicError as error:
                compiled.refuse(f"another one: its parser gave up ({error.reason})")
            finally:
                with self._lock:
                    self._cache.put(tenant, spec, compiled)
                self._permits.release(tenant)

        worker = threading.Thread(target=work, name="ramify-format", daemon=True)
        try:
            is_started = _compile_threads.start(worker)
        except RuntimeError:  # no more threads
            is_started = False
        if not is_started:
            self._permits.release(tenant)
            raise InvalidParamsError(
                "structured",
                "given",
                "None: no thread can be started to compile it, or the program is ending",
            )
        worker.join(max(0.0, deadline - time.monotonic()))
        with self._lock:
            cached = self._cache.get(tenant, spec)
            if cached is None:  # refuse it until the thread has compiled it
                cached = late = _CompiledGrammar(spec, self._vocab_size, self._token_texts)
                late.fault = f"simpler: it takes more than {COMPILE_S:g} s to compile"
                self._cache.put(tenant, spec, late)
            return cached


class _CompiledGrammar:
    """The matcher of a grammar before the first token, or why there is none."""

    def __init__(
        self, spec: StructuredOutput, vocab_size: int, token_texts: TokenTexts | None
    ) -> None:
        self.spec, self.vocab_size, self._token_texts = spec, vocab_size, token_texts
        self.start: LLMatcher | None = None
        self.triggered: TriggeredGrammar | None = None
        self.mask: TokenBitmask = np.zeros(0, np.uint8)
        self.fault = "another one: its parser gave up"  # unless `run` sets a better reason

    def run(self, tokenizer: LLTokenizer) -> None:
        """Compile; sets `start` and `mask`, or `fault`."""
        from llguidance import LLMatcher, LLParserLimits

        try:
            grammar = _grammar(self.spec)
        except Exception as error:  # noqa: BLE001 - foreign parsers; the error goes to the user
            self.fault = f"well-formed, but: {shortened(error)}"
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
            self.mask = next_mask(start, self.vocab_size)
        if start.is_error():
            reason = compile_reason(start.get_error())
            if reason.startswith("NoExtension"):
                reason = "no text satisfies it"
            self.fault = f"possible to follow, but: {reason}"
        elif not self.mask.any():
            self.fault = "possible to follow, but: no text satisfies it"
        else:
            if self.spec.free_text is not None and self._token_texts is not None:
                self.triggered = TriggeredGrammar.of(
                    start, self.mask, self._token_texts, self.spec.free_text
                )
            self.start = start

    def refuse(self, fault: str) -> None:
        """Make `matcher` raise an error with this reason."""
        self.start, self.fault = None, fault

    def matcher(self) -> GrammarMatcher:
        """A new matcher. Raises InvalidParamsError if the grammar was refused."""
        if self.start is None:
            name = next(name for name in self.spec.__slots__ if getattr(self.spec, name))
            raise InvalidParamsError(name, shortened(getattr(self.spec, name)), self.fault)
        if self.triggered is not None:
            return TriggeredMatcher(self.triggered)
        return LlguidanceMatcher(self.start, self.mask, self.vocab_size)


def can_enforce(keyword: str, value: str | float) -> bool:
    """Whether llguidance reads a JSON schema with this `pattern`, bound or `multipleOf`.

    True where it is not installed: nothing is enforced there.
    """
    try:
        from llguidance import LLMatcher
    except ImportError:
        return True
    schema = {"type": "string" if keyword == "pattern" else "number", keyword: value}
    try:
        with panics_as_errors("llguidance"):
            grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema))
            return not LLMatcher.validate_grammar(grammar)
    # Not all that Python reads as JSON is JSON.
    except (ValueError, LibraryPanicError):
        return False


def _grammar(spec: StructuredOutput) -> Any:
    """The grammar in llguidance's own form."""
    from llguidance import LLMatcher

    options: Any = JSON_OPTIONS
    if spec.json_object:
        return LLMatcher.grammar_from_json_schema('{"type": "object"}', defaults=options)
    if spec.json_schema is not None:
        return LLMatcher.grammar_from_json_schema(str(spec.json_schema), defaults=options)
    if spec.regex is not None:
        return LLMatcher.grammar_from_regex(spec.regex)
    if spec.grammar is not None:
        return LLMatcher.grammar_from_lark(_lark(spec.grammar))
    choices = " | ".join(json.dumps(text, ensure_ascii=False) for text in spec.choice or ())
    # One terminal: as rules, each text would be a parser item, and `step_max_items` limits those.
    return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}")


def _lark(grammar: str) -> str:
    """A grammar in Lark or GBNF as Lark."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if _LARK.search(grammar):
        return grammar
    if (num_rules := grammar.count("::=")) > MAX_GBNF_RULES:
        raise ValueError(f"it has {num_rules} rules; at most {MAX_GBNF_RULES}, or write it in Lark")
    return gbnf_to_lark(grammar)
