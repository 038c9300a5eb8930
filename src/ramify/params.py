"""Options of a request: sampling, stop conditions, structured output."""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from numbers import Integral, Real
from typing import Literal, Self, get_args

from ramify.errors import InvalidParamsError, UnknownParamError
from ramify.foreign_names import PARAM_NAMES, python_advice
from ramify.outputs import (
    CacheReport,
    Completion,
    FinishReason,
    RequestMetrics,
    RequestOutput,
    TokenLogprob,
    Usage,
)

# The outputs were defined here once; users import them from both places.
__all__ = [
    "CacheReport",
    "Completion",
    "FinishReason",
    "FreeText",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutput",
    "TokenLogprob",
    "Usage",
]


# A part of the output that is looked for: texts, and ids of special tokens, in their order.
Mark = tuple[str | int, ...]
# Hidden states of a prompt that make its embedding: the last token's, the mean, the first token's.
PoolingMode = Literal["last", "mean", "cls"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeText:
    """The parts of an output that its format, called grammar here, leaves free: before a trigger, and between two.

    Args:
        triggers: the output follows the grammar from the token on in which one of these begins.
            The grammar describes the text of that token and of all after it.
        resumes: where the grammar may end, the output is free again until the next trigger; False:
            it follows the grammar to the end of the answer.
        begins_after: the output follows the grammar from the token on that comes after a trigger.
        must_trigger: the answer must not end before a trigger.
        ignored: begins and ends of parts in which triggers do not count, as of reasoning.
        starts_ignored: the output begins inside of such a part.
        forbids_triggers: no trigger can be written, in whatever tokens: all of the output is free,
            and the format counts for nothing.

    Raises:
        InvalidParamsError: there is no trigger, or one is empty; `forbids_triggers` is combined with
            another option.
    """

    triggers: tuple[Mark, ...]
    resumes: bool = False
    begins_after: bool = False
    must_trigger: bool = False
    ignored: tuple[tuple[Mark, ...], tuple[Mark, ...]] = ((), ())
    starts_ignored: bool = False
    forbids_triggers: bool = False

    def __post_init__(self) -> None:
        begins, ends = self.ignored
        marks = (*self.triggers, *begins, *ends)
        if not self.triggers or not all(
            mark and all(part != "" for part in mark) for mark in marks
        ):
            raise InvalidParamsError("triggers", marks, "at least one, none of them empty")
        if (begins or self.starts_ignored) and not ends:
            raise InvalidParamsError("ignored", self.ignored, "without begins, or with an end")
        if self.forbids_triggers and (
            self.resumes or self.begins_after or self.must_trigger or ends
        ):
            raise InvalidParamsError("forbids_triggers", True, "False beside other options")


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutput:
    """A format that constrains the output, token by token: exactly one of the fields is given.

    Args:
        json_schema: a JSON schema; the output is JSON that satisfies it.
        json_object: True allows any JSON object.
        regex: matches the whole output (Rust's syntax: no look-around, no back references).
        grammar: a context-free grammar, in Lark's EBNF with a rule `start`, or GBNF with `root`.
        choice: the output is one of these texts.
        free_text: the parts of the output that do not follow the format.

    Raises:
        InvalidParamsError: none or several are given, or one is malformed, too long or too deep.
    """

    json_schema: Mapping[str, object] | str | None = None  # stored as text
    json_object: bool = False
    regex: str | None = None
    grammar: str | None = None
    choice: tuple[str, ...] | list[str] | None = None
    free_text: FreeText | None = None

    def __post_init__(self) -> None:
        if self.json_object not in (True, False):
            raise InvalidParamsError("json_object", self.json_object, "True or False")
        names = ("json_schema", "regex", "grammar", "choice")
        given = [name for name in names if getattr(self, name) is not None]
        given += ["json_object"] if self.json_object else []
        if len(given) != 1:
            formats = ", ".join(given) or "nothing"
            allowed = f"exactly one of {', '.join((*names, 'json_object'))}"
            raise InvalidParamsError("structured", formats, allowed)
        if self.json_schema is not None:
            object.__setattr__(self, "json_schema", _schema_text(self.json_schema))
        if self.choice is not None:
            if not _is_list(self.choice) or not all(
                isinstance(text, str) and text for text in self.choice
            ):
                raise InvalidParamsError("choice", self.choice, "a list of non-empty texts")
            object.__setattr__(self, "choice", tuple(dict.fromkeys(self.choice)))
        text = "".join(self.choice) if self.choice is not None else getattr(self, given[0])
        if given[0] != "json_object" and (not isinstance(text, str) or not text):
            allowed = "a list of texts, not empty" if given[0] == "choice" else "a text, not empty"
            raise InvalidParamsError(given[0], getattr(self, given[0]), allowed)
        if isinstance(text, str):
            try:
                num_bytes = len(text.encode())
            except UnicodeEncodeError as error:
                raise InvalidParamsError(given[0], text[error.start], "Unicode text") from None
            limit = MAX_GRAMMAR_BYTES if given[0] == "grammar" else MAX_FORMAT_BYTES
            if num_bytes > limit:
                raise InvalidParamsError(
                    given[0], f"{num_bytes} bytes", f"at most {limit} bytes: simplify it"
                )

    @property
    def num_chars(self) -> int:
        """Characters of its texts, as a measure of what it takes to keep it."""
        texts = (self.json_schema, self.regex, self.grammar, *(self.choice or ()))
        return sum(len(text) for text in texts if isinstance(text, str))


def _is_deep(schema: object) -> bool:
    """Whether a schema is nested deeper than MAX_FORMAT_DEPTH; iterative, as recursion could overflow."""
    level: list[object] = [schema]
    for _ in range(MAX_FORMAT_DEPTH + 1):
        below: list[object] = []
        for value in level:
            if isinstance(value, Mapping):
                below += value.values()
            elif isinstance(value, list | tuple):
                below += value
        # A level with more values than that makes a text above MAX_FORMAT_BYTES, which is refused.
        if not below or len(below) > MAX_FORMAT_BYTES:
            return False
        level = below
    return True


def _schema_text(schema: object) -> str:
    """Serialise a schema to JSON text."""
    too_deep = InvalidParamsError(
        "json_schema", "deeper", f"at most {MAX_FORMAT_DEPTH} levels deep; use $defs and $ref"
    )
    if isinstance(schema, str):
        # Refuse a long text before it is parsed.
        if len(schema) > MAX_FORMAT_BYTES:
            raise InvalidParamsError(
                "json_schema", f"{len(schema)} bytes", f"at most {MAX_FORMAT_BYTES} bytes"
            )
        try:
            schema = json.loads(schema)
        except RecursionError:
            raise too_deep from None
        except ValueError as error:
            raise InvalidParamsError("json_schema", str(schema)[:60], f"JSON: {error}") from None
    if not isinstance(schema, Mapping):
        raise InvalidParamsError("json_schema", schema, "an object")
    if _is_deep(schema):
        raise too_deep
    try:
        return json.dumps(schema, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidParamsError("json_schema", type(schema).__name__, f"JSON: {error}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters and stop conditions of a request.

    Logits pass through the options in the order of Hugging Face transformers: `logit_bias`,
    repetition, presence and frequency penalty, allowed tokens and grammar, temperature, `top_k`,
    `top_p`, `min_p`. Reported log probabilities are those before all of them.

    Args:
        temperature: 0 is greedy whatever top_k, top_p and min_p are.
        top_k: keep the k likeliest tokens; None keeps all.
        top_p: keep the smallest set of likeliest tokens with at least this mass; 1 keeps all.
        min_p: keep tokens at least this share as likely as the likeliest; 0 keeps all.
        repetition_penalty: positive logits of tokens in prompt or output are divided by it,
            negative logits multiplied; 1 changes nothing.
        presence_penalty: subtracted from the logit of each token that is in the output.
        frequency_penalty: subtracted once per occurrence in the output.
        logit_bias: token id -> value in -100..100 that is added to its logit.
        allowed_token_ids: sample from these tokens only; None allows all.
        banned_sequences: lists of token ids that the output does not contain.
        structured: a format that constrains the text; see `StructuredOutput`.
        seed: draws depend on (seed, position) only; None draws a fresh seed per request.
        n: number of answers; answer i draws as a separate request with seed + i would.
        max_tokens: output tokens at most; None: up to the context length. 0 only with
            `prompt_embedding`: the request ends with its prompt.
        min_tokens: stop strings, stop tokens and end of sequence are ignored before this many
            tokens. A complete structured output, and an end of sequence that is the only
            allowed token, still end the output.
        stop: strings that end the output; the matching string is not part of the output.
        include_stop: the stop string is part of the output, and the text of a stop token that has one.
        stop_token_ids: token ids that end the output, beside the model's own.
        ignore_eos: continue after the model's own end-of-sequence tokens.
        keep_special_tokens: special tokens that the text of the output contains: none (False), all
            (True), or a collection of their texts. A stop token is never part of the text.
        logprobs: likeliest tokens to report per output token; None reports none.
        prompt_logprobs: the same for the prompt; such a request reads nothing from the cache.
        prompt_embedding: report the prompt's hidden states, pooled; see `LLM.embed`.
        pooling: of `prompt_embedding`: "last" token, "mean", or "cls", the first token. A request
            with "mean" or "cls" reads nothing from the cache.

    Raises:
        InvalidParamsError: a value is outside its range.
        UnknownParamError: there is no parameter of this name.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | list[int] | None = None
    banned_sequences: tuple[tuple[int, ...], ...] | list[list[int]] = ()
    structured: StructuredOutput | None = None
    seed: int | None = None
    n: int = 1
    max_tokens: int | None = 128
    min_tokens: int = 0
    stop: str | tuple[str, ...] | list[str] = ()
    include_stop: bool = False
    stop_token_ids: tuple[int, ...] | list[int] = ()
    ignore_eos: bool = False
    keep_special_tokens: bool | tuple[str, ...] | list[str] = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_embedding: bool = False
    pooling: PoolingMode = "last"

    def __new__(cls, *_: object, **params: object) -> Self:
        """Refuse a name that is no parameter, with ours if it is that of another engine."""
        if not params.keys() <= SAMPLING_FIELDS:
            names = [field.name for field in fields(cls)]  # a subclass may have more
            name = next((name for name in params if name not in names), None)
            if name is None:
                return object.__new__(cls)
            advice = python_advice(PARAM_NAMES.get(name, ""))
            raise UnknownParamError(cls.__name__, name, names, advice)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        if not _is_number(self.temperature) or not 0.0 <= self.temperature <= sys.float_info.max:
            raise InvalidParamsError("temperature", self.temperature, "a finite number >= 0")
        if not _is_number(self.top_p) or not 0.0 < self.top_p <= 1.0:
            raise InvalidParamsError("top_p", self.top_p, "a number in (0, 1]; 1 keeps all")
        if not _is_number(self.min_p) or not 0.0 <= self.min_p <= 1.0:
            raise InvalidParamsError("min_p", self.min_p, "a number in [0, 1]; 0 keeps all")
        if self.top_k is not None and (not _is_int(self.top_k) or self.top_k < 1):
            raise InvalidParamsError("top_k", self.top_k, "None (keep all) or an integer >= 1")
        if not _is_int(self.n) or not 1 <= self.n <= MAX_ANSWERS:
            raise InvalidParamsError("n", self.n, f"an integer in 1..{MAX_ANSWERS}")
        if self.seed is not None and (not _is_int(self.seed) or not 0 <= self.seed < 2**63):
            raise InvalidParamsError("seed", self.seed, "None or an integer in [0, 2**63)")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and (not _is_int(value) or not 0 <= value <= MAX_LOGPROBS):
                raise InvalidParamsError(name, value, f"None or an integer in 0..{MAX_LOGPROBS}")
        if not isinstance(self.prompt_embedding, bool):
            raise InvalidParamsError("prompt_embedding", self.prompt_embedding, "True or False")
        if self.prompt_embedding and self.n > 1:
            raise InvalidParamsError("n", self.n, "1 with prompt_embedding")
        if self.pooling not in get_args(PoolingMode):
            allowed = ", ".join(map(repr, get_args(PoolingMode)))
            raise InvalidParamsError("pooling", self.pooling, allowed)
        self._check_ends()
        self._check_scores()
        self._make_plain()

    def seeded(self) -> Self:
        """These parameters with a seed: theirs, or else a drawn one.

        Whoever may send a request to a second engine draws the seed before the first.
        """
        return replace(self, seed=secrets.randbits(62)) if self.seed is None else self

    @property
    def needs_all_prompt_rows(self) -> bool:
        """Whether every prompt token must be computed, so that the cache cannot be read."""
        pools_all = self.prompt_embedding and self.pooling != "last"
        return self.prompt_logprobs is not None or pools_all

    @property
    def biases(self) -> dict[int, float]:
        """`logit_bias` by token id."""
        return dict(self.logit_bias)

    def _check_ends(self) -> None:
        """Validate the options that end the output."""
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not _is_list(stop) or not all(isinstance(text, str) and text for text in stop):
            raise InvalidParamsError("stop", self.stop, "non-empty strings")
        ids = self.stop_token_ids
        if not _is_list(ids) or not all(_is_int(token) and token >= 0 for token in ids):
            raise InvalidParamsError("stop_token_ids", ids, "token ids >= 0")
        object.__setattr__(self, "stop", tuple(stop))
        kept = self.keep_special_tokens
        if not isinstance(kept, bool):
            if not _is_list(kept) or not all(isinstance(text, str) and text for text in kept):
                allowed = "True, False or texts of special tokens"
                raise InvalidParamsError("keep_special_tokens", kept, allowed)
            object.__setattr__(self, "keep_special_tokens", tuple(kept))
        object.__setattr__(self, "stop_token_ids", tuple(map(int, ids)))
        least = 0 if self.prompt_embedding else 1
        if self.max_tokens is not None and (
            not _is_int(self.max_tokens) or self.max_tokens < least
        ):
            raise InvalidParamsError(
                "max_tokens", self.max_tokens, f"None or an integer >= {least}"
            )
        if not _is_int(self.min_tokens) or self.min_tokens < 0:
            raise InvalidParamsError("min_tokens", self.min_tokens, "an integer >= 0")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            limit = f"at most max_tokens={self.max_tokens}"
            raise InvalidParamsError("min_tokens", self.min_tokens, limit)

    def _check_scores(self) -> None:
        """Validate the options that change logits or forbid tokens."""
        penalty = self.repetition_penalty
        low, high = REPETITION_PENALTIES
        if not _is_number(penalty) or not low <= penalty <= high:
            allowed = f"a number in [{low:g}, {high:g}]; 1 changes nothing"
            raise InvalidParamsError("repetition_penalty", penalty, allowed)
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            if not _is_number(value) or not -MAX_PENALTY <= value <= MAX_PENALTY:
                allowed = f"a number in [-{MAX_PENALTY:g}, {MAX_PENALTY:g}]; 0 changes nothing"
                raise InvalidParamsError(name, value, allowed)
        object.__setattr__(self, "logit_bias", _plain_bias(self.logit_bias))
        ids = self.allowed_token_ids
        if ids is not None:
            if (
                not _is_list(ids)
                or not ids
                or not all(_is_int(token) and token >= 0 for token in ids)
            ):
                raise InvalidParamsError(
                    "allowed_token_ids", ids, "None (all) or at least one token id >= 0"
                )
            object.__setattr__(self, "allowed_token_ids", tuple(sorted(set(map(int, ids)))))
        banned = self.banned_sequences
        if not _is_list(banned) or not all(
            _is_list(ids) and ids and all(_is_int(token) and token >= 0 for token in ids)
            for ids in banned
        ):
            raise InvalidParamsError("banned_sequences", banned, "lists of token ids >= 0")
        num_banned = sum(map(len, banned))
        if num_banned > MAX_BANNED_TOKENS:
            limit = f"at most {MAX_BANNED_TOKENS} tokens in all"
            raise InvalidParamsError("banned_sequences", f"{num_banned} tokens", limit)
        plain_banned = dict.fromkeys(tuple(map(int, ids)) for ids in banned)
        object.__setattr__(self, "banned_sequences", tuple(plain_banned))
        if self.structured is not None and not isinstance(self.structured, StructuredOutput):
            raise InvalidParamsError("structured", self.structured, "None or a StructuredOutput")

    def _make_plain(self) -> None:
        """Convert numbers of other packages (NumPy scalars) to int and float."""
        for name in (
            "n",
            "top_k",
            "seed",
            "max_tokens",
            "min_tokens",
            "logprobs",
            "prompt_logprobs",
        ):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, int(getattr(self, name)))
        penalties = ("repetition_penalty", "presence_penalty", "frequency_penalty")
        for name in ("temperature", "top_p", "min_p", *penalties):
            object.__setattr__(self, name, float(getattr(self, name)))


SAMPLING_FIELDS = frozenset(field.name for field in fields(SamplingParams))
MAX_ANSWERS = 128  # the OpenAI API's limit
MAX_LOGPROBS = 1024  # bounds the output of one token; the OpenAI API allows 20
MAX_BANNED_TOKENS = 262_144  # bounds the memory of a request
MAX_BIAS = 100.0  # the OpenAI API's limit
MAX_PENALTY = 2.0  # the OpenAI API's limit
REPETITION_PENALTIES = (0.01, 100.0)  # float32 may overflow outside; usual are 1 to 1.5
MAX_FORMAT_BYTES = 65536  # of a schema, regex or list of choices, as UTF-8
MAX_GRAMMAR_BYTES = 262_144  # calls of 128 tools take about 100 kB
MAX_FORMAT_DEPTH = 64  # of objects and lists in a JSON schema


def _plain_bias(bias: object) -> tuple[tuple[int, float], ...]:
    """`logit_bias` as pairs of int and float by ascending token id. It may name a whole vocabulary."""
    pairs = tuple(bias.items()) if isinstance(bias, Mapping) else bias
    if not isinstance(pairs, tuple) or not all(
        isinstance(pair, tuple) and len(pair) == 2 for pair in pairs
    ):
        raise InvalidParamsError("logit_bias", bias, "a mapping of token ids >= 0 to numbers")
    tokens = [token for token, _ in pairs]
    if (
        not (set(map(type, tokens)) <= {int} or all(map(_is_int, tokens)))
        or min(tokens, default=0) < 0
    ):
        raise InvalidParamsError("logit_bias", bias, "a mapping of token ids >= 0 to numbers")
    has_plain_values = {type(value) for _, value in pairs} <= {int, float}
    for token, value in pairs:
        if not (has_plain_values or _is_number(value)) or not -MAX_BIAS <= value <= MAX_BIAS:
            allowed = f"a number in [-{MAX_BIAS:g}, {MAX_BIAS:g}]"
            raise InvalidParamsError(f"logit_bias[{token}]", value, allowed)
    return tuple(sorted({int(token): float(value) for token, value in pairs}.items()))


def _is_list(value: object) -> bool:
    # no generator: it could be read only once
    return isinstance(value, tuple | list | set | frozenset)


def _is_int(value: object) -> bool:
    # The first is ten times as fast: options may name every token of a vocabulary.
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def _is_number(value: object) -> bool:
    return type(value) in (int, float) or (isinstance(value, Real) and not isinstance(value, bool))
