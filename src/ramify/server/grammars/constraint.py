"""Grammar that constrains an answer: calls of the request's tools, its response format, or either."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ramify.engine.text.tokenizer import Tokenizer
from ramify.errors import CompileBusyError, InvalidParamsError, LibraryPanicError
from ramify.params import SamplingParams, StructuredOutput
from ramify.server.engine_client import EngineClient
from ramify.server.errors import ApiError
from ramify.server.grammars.tool_schemas import (
    SchemaTooLargeError,
    SchemaWarnings,
    enforceable_schema,
)
from ramify.server.model_dialects.call_grammar import AnswerBegin, AnswerGrammars
from ramify.server.model_dialects.lark_rules import AddedTokens, CallableTool
from ramify.server.model_dialects.output_format import OutputFormat

MAX_SCHEMA_CHARS = 200_000  # of the rules of all tools in a grammar; further arguments are free
RULE_CHARS = 300  # of the rules of a tool, its schema not included
# If the schemas do not compile together, each is compiled alone, within these limits; tools that are
# not reached have free arguments.
MAX_TOOLS_TRIED = 128
TRY_S = 2.0
ANY_OBJECT: dict[str, Any] = {"type": "object"}
# Names of what no client sends: the formats of `StructuredOutput`.
FORMAT_PARAMS = frozenset(("structured", *StructuredOutput.__slots__))
_NO_FORMAT = re.compile("(None|possible to follow, but|well-formed, but|another one): ")


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool that the model may call.

    Args:
        where: its path in the request: `tools[0]`.
        strict: refuse a schema that cannot be enforced.
    """

    name: str
    schema: Mapping[str, Any]
    where: str
    strict: bool = False

    @classmethod
    def of(cls, function: Mapping[str, Any], where: str) -> OfferedTool:
        """A function as chat templates take it."""
        schema = function.get("parameters") or ANY_OBJECT
        return cls(function["name"], schema, where, strict=function.get("strict") is True)


@dataclass(frozen=True, slots=True)
class CallChoice:
    """Which calls an answer may have.

    Args:
        is_forced: nothing but calls.
        name: of the tool that must be called; None if it may be any.
        is_single: one call at most.
    """

    is_forced: bool = False
    name: str | None = None
    is_single: bool = False


class AnswerConstraints:
    """Makes the grammars that constrain the answers of one model. Thread-safe.

    Every constraint is compiled once here, into the tenant's part of the cache, so that what cannot
    be enforced is known in time.

    Args:
        shows_tools: the chat template writes tools into the prompt.
    """

    def __init__(
        self,
        engine: EngineClient,
        tokenizer: Tokenizer,
        output_format: OutputFormat,
        *,
        shows_tools: bool = True,
    ) -> None:
        self._engine, self._tokenizer = engine, tokenizer
        self._reasoning, self._openings = output_format.reasoning.marks, output_format.call_openings
        self._shows_tools = shows_tools
        self._grammars = AnswerGrammars(
            output_format.calls.name,
            AddedTokens(tokenizer.added_token_texts),
            template="\n".join(tokenizer.chat_template_sources),
        )

    def of_answer(
        self,
        offered: Sequence[OfferedTool],
        choice: CallChoice,
        *,
        prompt_end: str,
        tenant: str,
        answer_format: StructuredOutput | None,
        warnings: list[str],
    ) -> StructuredOutput | None:
        """The constraint of an answer; None if it is free.

        Args:
            prompt_end: the end of the prompt, which may have begun the reasoning.
            answer_format: what an answer without calls must match, after reasoning.
            warnings: what is not enforced is appended.

        Raises:
            ApiError, InvalidParamsError: 400, a strict tool's schema cannot be enforced, or calls
                are forced and cannot be.
            CompileBusyError: calls are forced and cannot be compiled now.
        """
        begin = AnswerBegin.after(prompt_end, self._reasoning)
        if not offered:
            return None if answer_format is None else self._format(answer_format, begin, tenant)
        if not self._shows_tools:
            warnings.append("tools: the model does not see them, its chat template leaves them out")
        if choice.name is not None:
            offered = [tool for tool in offered if tool.name == choice.name]
        write = partial(_write, self._grammars, begin, choice, answer_format)
        try:
            spec = self._enforceable(write, offered, tenant, warnings)
        except CompileBusyError as error:
            if choice.is_forced:
                raise
            spec = None
            warnings.append(f"tools: arguments are not constrained: {error}")
        except InvalidParamsError as error:
            if choice.is_forced and error.name == "grammar":
                raise ApiError(
                    400, f"these calls cannot be forced: {error.allowed}", param="tools"
                ) from error
            if choice.is_forced:
                raise
            spec = None
            if error.name != "structured":
                warnings.append(f"tools: arguments are not constrained: {error.allowed}")
        if spec is not None or answer_format is None or choice.is_forced:
            return spec
        warnings.append("tools: none can be called, because the answer has a format")
        return self._format(answer_format, begin, tenant)

    def without_calls(self, params: SamplingParams, tenant: str) -> SamplingParams:
        """Parameters of an answer that must not begin a call, though the prompt has tools.

        What begins a call cannot be written, in whatever tokens. Where no grammar can be compiled, it
        cannot be drawn as the token that was added to the vocabulary for it, or as the tokens of its
        text. Nothing is needed where the answer has a format.
        """
        if params.structured is not None or not self._openings:
            return params
        spec = self._grammars.without_calls(self._openings)
        try:
            self._compile(spec, tenant)
        except (CompileBusyError, InvalidParamsError, LibraryPanicError):
            banned = (*params.banned_sequences, *self._opening_tokens())
            return replace(params, banned_sequences=banned)
        return replace(params, structured=spec)

    def _opening_tokens(self) -> Iterator[tuple[int, ...]]:
        """The tokens in which a model writes what begins a call."""
        added = {text: token for token, text in self._tokenizer.added_token_texts.items()}
        for opening in self._openings:
            if opening in added:
                yield (added[opening],)
            else:
                for before in ("", " ", "\n"):
                    ids = self._tokenizer.encode(before + opening, add_special_tokens=False)
                    yield tuple(ids)

    def _format(
        self, answer_format: StructuredOutput, begin: AnswerBegin, tenant: str
    ) -> StructuredOutput:
        """The constraint of an answer in a format; errors are in the words of the request."""
        spec = self._grammars.format(answer_format, begin)
        try:
            self._compile(spec, tenant)
        except InvalidParamsError as error:
            if spec is answer_format or error.name == "structured":
                raise
            self._compile(answer_format, tenant)
            raise ApiError(
                400, f"the format cannot be enforced after reasoning: {error.allowed}"
            ) from error
        return spec

    def _enforceable(
        self,
        write: Callable[[Sequence[CallableTool]], StructuredOutput | None],
        offered: Sequence[OfferedTool],
        tenant: str,
        warnings: list[str],
    ) -> StructuredOutput | None:
        """The constraint that `write` makes, simpler where a schema cannot be compiled."""
        tools = self._callable(offered, warnings)
        try:
            return self._compiled(write(tools), tenant)
        except InvalidParamsError as error:
            if error.name == "structured":  # nothing can be compiled now
                raise
        return self._compiled(write(self._compilable(offered, tools, tenant, warnings)), tenant)

    def _compiled(self, spec: StructuredOutput | None, tenant: str) -> StructuredOutput | None:
        """A constraint that has been compiled."""
        if spec is not None:
            self._compile(spec, tenant)
        return spec

    def _compile(self, spec: StructuredOutput, tenant: str) -> None:
        self._engine.compile_grammar(SamplingParams(structured=spec), tenant)

    def _callable(self, offered: Sequence[OfferedTool], warnings: list[str]) -> list[CallableTool]:
        """The tools with schemas that can be enforced, as far as is known without compiling."""
        schema_warnings, num_chars = SchemaWarnings(), 0
        tools = []
        for tool in offered:
            try:
                schema = enforceable_schema(
                    tool.schema, tool.where, schema_warnings, strict=tool.strict
                )
                num_chars += RULE_CHARS + len(json.dumps(schema, ensure_ascii=False))
            except SchemaTooLargeError:
                schema, num_chars = ANY_OBJECT, MAX_SCHEMA_CHARS + 1
            if num_chars > MAX_SCHEMA_CHARS:
                schema = _free_arguments(tool, "the schemas are too large", warnings)
            tools.append(CallableTool(tool.name, schema))
        warnings += schema_warnings.messages
        return tools

    def _compilable(
        self,
        offered: Sequence[OfferedTool],
        tools: Sequence[CallableTool],
        tenant: str,
        warnings: list[str],
    ) -> list[CallableTool]:
        """The tools with arguments in the schema's order, free where a schema cannot be compiled."""
        checked = [replace(tool, any_order=False) for tool in tools]
        deadline = time.monotonic() + TRY_S
        for index, tool in enumerate(checked[:MAX_TOOLS_TRIED]):
            try:
                if time.monotonic() > deadline:
                    raise InvalidParamsError("tools", "given", "simpler: they take too long")
                self._compile(StructuredOutput(json_schema=tool.schema), tenant)
            except InvalidParamsError as error:
                if error.name == "structured":
                    raise
                schema = _free_arguments(offered[index], str(error.allowed), warnings)
                checked[index] = replace(tool, schema=schema)
        return checked


def _write(
    grammars: AnswerGrammars,
    begin: AnswerBegin,
    choice: CallChoice,
    answer_format: StructuredOutput | None,
    tools: Sequence[CallableTool],
) -> StructuredOutput | None:
    """The constraint of an answer that may or must call these tools; None if there is none."""
    single = choice.is_single or choice.name is not None
    if choice.is_forced:
        return grammars.forced_calls(tools, begin, single=single)
    if answer_format is None:
        return grammars.optional_calls(tools, begin, single=single)
    return grammars.forced_calls(tools, begin, single=single, or_format=answer_format)


def refused_format(error: InvalidParamsError, field: str) -> ApiError:
    """The response to a format, or to forced calls, that cannot be compiled.

    Args:
        error: of a name in `FORMAT_PARAMS`.
        field: of the request, which says what the answer must be.
    """
    reason = _NO_FORMAT.sub("", error.allowed)
    if error.allowed.startswith("simpler: "):
        reason = f"{error.allowed.removeprefix('simpler: ')}; simplify it"
    value = json.dumps(error.value, ensure_ascii=False) if error.name == "regex" else "it"
    return ApiError(400, f"{value} cannot be enforced: {reason}", param=field)


def written_format(field: str, **kind: Any) -> StructuredOutput:
    """A format of a request's field. Raises ApiError 400: it is empty, too long or malformed."""
    try:
        return StructuredOutput(**kind)
    except InvalidParamsError as error:
        value = f"{error.value} is not possible; " if isinstance(error.value, str) else ""
        value = value if error.value else ""
        raise ApiError(400, f"{value}it must be {error.allowed}", param=field) from error


def schema_format(
    schema: Mapping[str, Any], where: str, warnings: list[str], *, strict: bool
) -> StructuredOutput:
    """The format of an answer that is JSON of a schema; what is not enforced is appended to `warnings`.

    Raises:
        ApiError: 400, `strict` and it cannot be enforced, a `type` does not exist, it is too large, or
            see `written_format`.
    """
    schema_warnings = SchemaWarnings()
    try:
        enforceable = enforceable_schema(
            schema, where, schema_warnings, strict=strict, checks_types=True
        )
    except SchemaTooLargeError:
        raise ApiError(400, "the schema is too large; simplify it", param=where) from None
    warnings += schema_warnings.messages
    return written_format(where, json_schema=enforceable)


def _free_arguments(tool: OfferedTool, reason: str, warnings: list[str]) -> dict[str, Any]:
    """The schema that replaces one that cannot be enforced. Raises ApiError if that is `strict`."""
    if tool.strict:
        raise ApiError(400, f"its schema cannot be enforced: {reason}", param=tool.where)
    warnings.append(f"{tool.where}: its schema is not enforced: {reason}")
    return ANY_OBJECT
