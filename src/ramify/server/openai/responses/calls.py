"""Calls of an answer as output items, each in the form of the tool that the client sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ramify.server.answers.answer import AnswerPart
from ramify.server.answers.partial_json import partial_object
from ramify.server.openai.responses.custom_input import CustomInputDecoder, custom_input
from ramify.server.openai.responses.tools import CallForm, CallKind

NumberedEvent = Callable[..., dict[str, Any]]  # the next of a stream: `event("completed", …)`


class StreamedCall(Protocol):
    """An output item that is a call, and the events of its stream."""

    def as_json(self, status: str) -> dict[str, Any]:
        """The item, with what was generated until now."""
        ...

    def begin(self, event: NumberedEvent) -> list[dict[str, Any]]:
        """The events of its beginning."""
        ...

    def delta(self, text: str, event: NumberedEvent) -> list[dict[str, Any]]:
        """The events of new text of the arguments."""
        ...

    def end(self, status: str, event: NumberedEvent) -> list[dict[str, Any]]:
        """The events of its end."""
        ...


@dataclass(frozen=True, slots=True)
class CallText:
    """The text of a call: its field of the item, and the name of its events."""

    field: str
    events: str


ITEM_TYPES: dict[CallKind, str] = {
    "function": "function_call",
    "custom": "custom_tool_call",
    "local_shell": "local_shell_call",
    "shell": "shell_call",
    "apply_patch": "apply_patch_call",
}
# By type of the item.
CALL_TEXTS = {
    "function_call": CallText("arguments", "function_call_arguments"),
    "custom_tool_call": CallText("input", "custom_tool_call_input"),
}


class StreamedTextCall:
    """`function_call` or `custom_tool_call`: the text is streamed as it is written.

    The text of a custom tool is decoded from the arguments, see `custom_input`.
    """

    def __init__(self, part: AnswerPart, form: CallForm, item_id: str) -> None:
        self._part, self._form, self._id = part, form, item_id
        self._text = CALL_TEXTS[ITEM_TYPES[form.kind]]
        self._place = {"item_id": item_id, "output_index": part.index}
        self._decoder = CustomInputDecoder() if form.kind == "custom" else None

    def as_json(self, status: str) -> dict[str, Any]:
        """See `StreamedCall`."""
        form, text = self._form, "" if status == "in_progress" else self._part.text
        if self._decoder is not None:
            text = custom_input(text)
        namespace = {} if form.namespace is None else {"namespace": form.namespace}
        return {
            "id": self._id,
            "type": ITEM_TYPES[form.kind],
            "call_id": self._part.id,
            "name": form.name,
            **namespace,
            self._text.field: text,
            "status": status,
        }

    def begin(self, event: NumberedEvent) -> list[dict[str, Any]]:
        """See `StreamedCall`."""
        return [_item_event("added", self._part, self.as_json("in_progress"), event)]

    def delta(self, text: str, event: NumberedEvent) -> list[dict[str, Any]]:
        """See `StreamedCall`."""
        if self._decoder is not None:
            text = self._decoder.feed(text)
        return self._delta(text, event)

    def end(self, status: str, event: NumberedEvent) -> list[dict[str, Any]]:
        """See `StreamedCall`."""
        rest = "" if self._decoder is None else self._decoder.finish(self._part.text)
        item, field = self.as_json(status), self._text.field
        name = {"name": self._form.name} if self._form.kind == "function" else {}
        return [
            *self._delta(rest, event),
            event(f"{self._text.events}.done", **self._place, **name, **{field: item[field]}),
            _item_event("done", self._part, item, event),
        ]

    def _delta(self, text: str, event: NumberedEvent) -> list[dict[str, Any]]:
        if not text:
            return []
        return [event(f"{self._text.events}.delta", **self._place, delta=text)]


class StreamedActionCall:
    """`local_shell_call`, `shell_call` or `apply_patch_call`: sent when its arguments are whole."""

    def __init__(self, part: AnswerPart, form: CallForm, item_id: str) -> None:
        self._part, self._kind, self._id = part, form.kind, item_id

    def as_json(self, status: str) -> dict[str, Any]:
        """See `StreamedCall`."""
        fields = _ACTIONS[self._kind](partial_object(self._part.text))
        item = {"id": self._id, "type": f"{self._kind}_call", "call_id": self._part.id}
        if self._kind == "apply_patch" and status == "incomplete":
            status = "in_progress"  # the type has no other name for it
        return item | fields | {"status": status}

    def begin(self, event: NumberedEvent) -> list[dict[str, Any]]:  # noqa: ARG002
        """See `StreamedCall`."""
        return []

    def delta(self, text: str, event: NumberedEvent) -> list[dict[str, Any]]:  # noqa: ARG002
        """See `StreamedCall`."""
        return []

    def end(self, status: str, event: NumberedEvent) -> list[dict[str, Any]]:
        """See `StreamedCall`."""
        return [
            _item_event("added", self._part, self.as_json("in_progress"), event),
            _item_event("done", self._part, self.as_json(status), event),
        ]


def _item_event(
    kind: str, part: AnswerPart, item: dict[str, Any], event: NumberedEvent
) -> dict[str, Any]:
    return event(f"output_item.{kind}", output_index=part.index, item=item)


def _lines(value: object) -> list[str]:
    """A command as a list of texts, also if the model wrote a single text."""
    if isinstance(value, str):
        return [value]
    return [str(line) for line in value] if isinstance(value, Sequence) else []


def _number(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _local_shell_action(arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        "action": {
            "type": "exec",
            "command": _lines(arguments.get("command")),
            "env": {},
            "timeout_ms": _number(arguments.get("timeout_ms")),
            "working_directory": _text(arguments.get("working_directory")),
            "user": None,
        }
    }


def _shell_action(arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        "action": {
            "commands": _lines(arguments.get("commands")),
            "timeout_ms": _number(arguments.get("timeout_ms")),
            "max_output_length": None,
        },
        "environment": {"type": "local"},
    }


def _patch_operation(arguments: dict[str, Any]) -> dict[str, Any]:
    kind = arguments.get("type")
    if kind not in ("create_file", "update_file", "delete_file"):
        kind = "update_file"
    operation = {"type": kind, "path": _text(arguments.get("path")) or ""}
    if kind != "delete_file":
        operation["diff"] = _text(arguments.get("diff")) or ""
    return {"operation": operation}


_ACTIONS: dict[CallKind, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "local_shell": _local_shell_action,
    "shell": _shell_action,
    "apply_patch": _patch_operation,
}
_STREAMED: dict[CallKind, Callable[[AnswerPart, CallForm, str], StreamedCall]] = {
    "function": StreamedTextCall,
    "custom": StreamedTextCall,
    "local_shell": StreamedActionCall,
    "shell": StreamedActionCall,
    "apply_patch": StreamedActionCall,
}


def streamed_call(part: AnswerPart, form: CallForm, item_id: str) -> StreamedCall:
    """The item of a call, in the form of its tool."""
    return _STREAMED[form.kind](part, form, item_id)
