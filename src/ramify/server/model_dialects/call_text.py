"""Writes calls as a model of a family would: for chat templates that have no place for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ramify.server.model_dialects.call_syntax import (
    JSON_SYNTAX,
    CallSyntax,
    Delimiter,
    Maybe,
    Piece,
    Slot,
    find_syntax,
)
from ramify.server.model_dialects.json_scanner import json_text

NamedCall = tuple[str, Any]  # name and arguments


def calls_text(call_format: str, template: str, calls: Sequence[NamedCall]) -> str:
    """The calls as a row of `CALL_FORMATS` writes them; as bare JSON if it has no syntax.

    Args:
        template: the chat template, which shows the variant.
    """
    syntax = find_syntax(call_format, template) or JSON_SYNTAX
    separator = _text(syntax.separator, syntax) or "\n"
    texts = [_text(syntax.call, syntax, call, index) for index, call in enumerate(calls)]
    return f"{_text(syntax.begin, syntax)}{separator.join(texts)}{_text(syntax.end, syntax)}"


def _text(
    pieces: Sequence[Piece], syntax: CallSyntax, call: NamedCall = ("", {}), index: int = 0
) -> str:
    name, arguments = call
    texts = {
        Slot.NAME: name,
        Slot.QUOTED_NAME: json_text(name),
        Slot.ARGUMENTS: json_text(arguments),
        Slot.INDEX: str(index),
        Slot.CALL_ID: json_text(str(index)),
        Slot.PARAMETERS: "",
        Slot.TEXT: "",
    }
    if syntax.parameters is not None and isinstance(arguments, Mapping):
        texts[Slot.PARAMETERS] = "".join(
            _parameter(syntax, key, value) for key, value in arguments.items()
        )
    written = ""
    for piece in pieces:
        if isinstance(piece, Maybe):
            continue
        if piece is Slot.SPACE:
            # As `json.dumps` does.
            written += " " if written.endswith((":", ",")) else ""
        elif isinstance(piece, Slot):
            written += texts[piece]
        else:
            written += piece.text if isinstance(piece, Delimiter) else piece
    return written


def _parameter(syntax: CallSyntax, key: str, value: Any) -> str:
    parameters = syntax.parameters
    assert parameters is not None, "only called for syntaxes with parameters"
    is_text = isinstance(value, str)
    after_name = (parameters.after_name_of_text if is_text else ()) or parameters.after_name
    text = value if is_text else json_text(value)
    return f"{parameters.begin}{key}{_text(after_name, syntax)}{text}{parameters.end}\n"
