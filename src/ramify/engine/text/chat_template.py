"""Chat templates: a conversation becomes the text that a checkpoint was trained on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ramify.errors import ChatTemplateError, CheckpointError

DEFAULT, TOOL_USE = "default", "tool_use"

# What a template does with messages that it did not expect is up to its author.
_TEMPLATE_FAULTS = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)

Messages = Sequence[Mapping[str, Any]]


class ChatTemplates:
    """The chat templates of one checkpoint, rendered by sandboxed Jinja.

    Args:
        sources: name → Jinja source; `default` is the usual one.
        variables: what every template sees, such as bos_token → "<s>".
    """

    def __init__(self, sources: Mapping[str, str], variables: Mapping[str, str]) -> None:
        self._sources, self._variables = dict(sources), dict(variables)
        self._environment = _environment()

    @property
    def default(self) -> str | None:
        """The source of the usual template; None if there is none."""
        return self._sources.get(DEFAULT)

    def render(
        self,
        messages: Messages,
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        **options: Any,
    ) -> str:
        """See `Tokenizer.apply_chat_template`."""
        name = TOOL_USE if tools and TOOL_USE in self._sources else DEFAULT
        if name not in self._sources:
            raise ChatTemplateError(
                "the checkpoint has no chat template (chat_template.jinja, or chat_template in "
                "tokenizer_config.json); send a plain prompt instead of messages"
            )
        variables = {
            **self._variables,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **options,
        }
        # What is None is not there, as in transformers; some templates ask whether it is none.
        there = [
            {key: value for key, value in one.items() if value is not None}
            if isinstance(one, Mapping)
            else one
            for one in messages
        ]
        try:
            template = self._environment.from_string(self._sources[name])
            try:
                return template.render(variables, messages=there)
            except _TEMPLATE_FAULTS:
                if there == list(messages):
                    raise
                return template.render(variables, messages=messages)
        except _TEMPLATE_FAULTS as error:
            raise ChatTemplateError(
                f"the chat template cannot render these {len(messages)} messages: {error}"
            ) from error


class _GenerationTag(Extension):
    """`{% generation %}` marks what the assistant says, for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012 - read by jinja

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The statements between the tags, as they are."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """Jinja as chat templates expect it; they are foreign code, so it is the sandboxed one."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of Jinja's own filter, which models have never seen."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)  # noqa: DTZ005 - local, as templates expect


def read_chat_templates(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name; files win over what tokenizer_config.json says."""
    templates: dict[str, str] = {}
    found = config.get("chat_template")
    if isinstance(found, str):
        templates[DEFAULT] = found
    elif isinstance(found, list):
        for entry in found:
            if isinstance(entry, Mapping) and {"name", "template"} <= entry.keys():
                templates[str(entry["name"])] = str(entry["template"])
    files = {DEFAULT: path / "chat_template.jinja"}
    files |= {file.stem: file for file in (path / "additional_chat_templates").glob("*.jinja")}
    for name, file in files.items():
        if file.is_file():
            try:
                templates[name] = file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise CheckpointError(f"{file} cannot be read: {error}") from error
    return templates
