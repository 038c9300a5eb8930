"""Chat templates: Jinja sources of a checkpoint that render messages to the text of a prompt."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Environment, Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from ramify.engine.text.template_limits import (
    LimitedEnvironment,
    TemplateLimitError,
    limited_rendering,
)
from ramify.errors import ChatTemplateError, ChatTemplateLimitError, CheckpointError
from ramify.models.configs.checkpoint_files import MAX_TEMPLATE_BYTES, read_checkpoint_file
from ramify.models.configs.fields import read_json_value
from ramify.reasons import reason_of

DEFAULT, TOOL_USE, RAG = "default", "tool_use", "rag"

# A template may fail in any of these ways on messages that its author did not expect.
_TEMPLATE_FAULTS = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
    MemoryError,
    SyntaxError,  # of the Python code that Jinja makes of it: a `break` outside a loop
)

Messages = Sequence[Mapping[str, Any]]
NEEDLE = "qzneedlec"  # a word that no template contains
# Of a tool that has none. Templates read them, and some fail where they are missing.
NO_PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}


class ChatTemplates:
    """The chat templates of one checkpoint, rendered by sandboxed Jinja.

    Args:
        sources: name → Jinja source; `tool_use` is taken if there are tools, `rag` if there are
            documents, else `default`.
        variables: what every template sees, such as bos_token → <s>.
    """

    def __init__(self, sources: Mapping[str, str], variables: Mapping[str, str]) -> None:
        self._sources, self._variables = dict(sources), dict(variables)
        self._environment = _environment()
        self._compiled: dict[str, Template] = {}
        self._reads_parts: dict[str, bool] = {}

    @property
    def default(self) -> str | None:
        """Source of the default template; None if there is none."""
        return self._sources.get(DEFAULT)

    @property
    def sources(self) -> tuple[str, ...]:
        """Sources of the templates that are rendered: without tools, with tools, with documents."""
        names = (DEFAULT, TOOL_USE, RAG)
        return tuple(self._sources[name] for name in names if name in self._sources)

    def variable_names(self) -> frozenset[str]:
        """All names that the templates mention, their own included; parses the templates."""
        names: set[str] = set()
        for source in self._sources.values():
            try:
                tree = self._environment.parse(source)
                names |= {node.name for node in tree.find_all(nodes.Name)}
            except _TEMPLATE_FAULTS:  # rendering reports it
                continue
        return frozenset(names)

    def _template(self, name: str) -> Template:
        """The compiled template; compiling takes longer than rendering a short conversation."""
        template = self._compiled.get(name)
        if template is None:
            template = self._environment.from_string(self._sources[name])
            self._compiled[name] = template
        return template

    def _takes_parts_only(self, name: str) -> bool:
        """Whether a template loses content that is a text, and writes that of a list of parts.

        So do templates of many models that read images.
        """
        if name not in self._reads_parts:
            self._reads_parts[name] = not self._writes(name, NEEDLE) and self._writes(
                name, _parts(NEEDLE)
            )
        return self._reads_parts[name]

    def _writes(self, name: str, content: object) -> bool:
        """Whether `NEEDLE` in the content of a user's message is in the prompt."""
        variables = {
            **self._variables,
            "messages": [{"role": "user", "content": content}],
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
        }
        try:
            with limited_rendering():
                return NEEDLE in self._template(name).render(variables)
        except TemplateLimitError:
            raise
        except _TEMPLATE_FAULTS:
            return False

    def render(
        self,
        messages: Messages,
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        **options: Any,
    ) -> str:
        """See `Tokenizer.apply_chat_template`."""
        name = DEFAULT
        if tools and TOOL_USE in self._sources:
            name = TOOL_USE
        elif options.get("documents") and RAG in self._sources:
            name = RAG
        if name not in self._sources:
            raise ChatTemplateError(
                "the checkpoint has no chat template (chat_template.jinja, or chat_template in "
                "tokenizer_config.json); send a plain prompt instead of messages"
            )
        variables = {
            **self._variables,
            "tools": _tools_with_parameters(tools),
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **options,
        }
        # transformers leaves out keys whose value is None; some templates test for none instead.
        without_none = [
            {key: value for key, value in message.items() if value is not None}
            if isinstance(message, Mapping)
            else message
            for message in messages
        ]
        try:
            template = self._template(name)
            if self._takes_parts_only(name):
                messages, without_none = map(_with_parts, (messages, without_none))
            with limited_rendering():
                try:
                    return template.render(variables, messages=without_none)
                except TemplateLimitError:
                    raise
                except _TEMPLATE_FAULTS:
                    if without_none == list(messages):
                        raise
                    return template.render(variables, messages=messages)
        except TemplateLimitError as error:
            raise ChatTemplateLimitError(
                f"the chat template cannot render these {len(messages)} messages: {error}; send "
                "shorter messages, or replace the checkpoint's chat_template.jinja"
            ) from error
        except _TEMPLATE_FAULTS as error:
            raise ChatTemplateError(
                f"the chat template cannot render these {len(messages)} messages: {error}"
            ) from error


def with_parameters(function: Mapping[str, Any]) -> dict[str, Any]:
    """The definition of a function; one without parameters, or with null, has `NO_PARAMETERS`."""
    if function.get("parameters") is not None:
        return dict(function)
    return {**function, "parameters": dict(NO_PARAMETERS)}


def _tools_with_parameters(tools: Sequence[Any] | None) -> Sequence[Any] | None:
    return tools and [
        {**tool, "function": with_parameters(tool["function"])}
        if isinstance(tool, Mapping) and isinstance(tool.get("function"), Mapping)
        else tool
        for tool in tools
    ]


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _with_parts(messages: Messages) -> list[Any]:
    """Messages whose contents are no texts, but lists of parts."""
    return [
        {**message, "content": _parts(message["content"])}
        if isinstance(message, Mapping) and isinstance(message.get("content"), str)
        else message
        for message in messages
    ]


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's text for training; here it has no effect."""

    tags = {"generation"}  # noqa: RUF012 - read by jinja

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The statements between the tags, unchanged."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def parse_template(source: str) -> nodes.Template:
    """The syntax tree of a template, without the nodes that bound its rendering.

    Raises:
        TemplateError: it is no template.
    """
    return Environment(extensions=[loopcontrols, _GenerationTag]).parse(source)  # noqa: S701 - no HTML


def _environment() -> LimitedEnvironment:
    """Jinja with what chat templates expect; sandboxed, because a template is foreign code."""
    environment = LimitedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.limit_filters()
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of Jinja's own `tojson`, which models have never seen."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def strftime_now(form: str) -> str:
    """The time of now in a format of `strftime`; `template_limits` bounds it by this name."""
    return datetime.now().strftime(form)  # noqa: DTZ005 - templates expect local time


def read_chat_templates(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Sources of a checkpoint's chat templates by name.

    Files (`chat_template.jinja`, `additional_chat_templates/*.jinja`) win over the entries of
    `tokenizer_config.json`, which is `config`, and those over `chat_template.json`.

    Raises:
        CheckpointError: a file cannot be read.
    """
    templates: dict[str, str] = {}
    configured = config.get("chat_template")
    if isinstance(configured, str):
        templates[DEFAULT] = configured
    elif isinstance(configured, list):
        for entry in configured:
            if isinstance(entry, Mapping) and {"name", "template"} <= entry.keys():
                templates[str(entry["name"])] = str(entry["template"])
    processor = path / "chat_template.json"
    if DEFAULT not in templates and processor.exists():
        # Models that read images too have their template beside the processor.
        configured = _read_processor_template(processor)
        templates |= {} if configured is None else {DEFAULT: configured}
    files = {DEFAULT: path / "chat_template.jinja"}
    files |= {file.stem: file for file in (path / "additional_chat_templates").glob("*.jinja")}
    for name, file in files.items():
        if file.exists():
            try:
                templates[name] = read_checkpoint_file(file, MAX_TEMPLATE_BYTES).decode("utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise CheckpointError(f"{file} cannot be read: {reason_of(error, file)}") from error
    return templates


def _read_processor_template(file: Path) -> str | None:
    """`chat_template` of a processor's `chat_template.json`; None without that field."""
    fields = read_json_value(file)
    template = fields.get("chat_template") if isinstance(fields, dict) else None
    if template is not None and not isinstance(template, str):
        raise CheckpointError(f"{file}: chat_template must be a text; download it again")
    return template
