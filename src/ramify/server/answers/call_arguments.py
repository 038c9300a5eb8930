"""Arguments of the calls that clients send back, as the object that chat templates take."""

from __future__ import annotations

from typing import Any

from ramify.server.answers.partial_json import completed_object, decoded
from ramify.server.http.json_limits import check_json_limits

OTHER_VALUE = "arguments"  # the name under which a value that is no object is shown to the model


def call_arguments(value: object, path: str) -> dict[str, Any]:
    """The arguments of a call from its JSON text, or from the object that some clients send.

    A text that ends too early, as of an answer that `max_tokens` cut off, is completed. Whatever is no
    object becomes the only member of one, so that no call makes a conversation unusable.

    Args:
        path: of the arguments in the request.

    Raises:
        ApiError: 400, the text exceeds the limits of JSON bodies.
    """
    if isinstance(value, str) and value.strip():
        check_json_limits(value.encode("utf-8", "surrogatepass"), what="its JSON", param=path)
        value = _decoded(value)
        if isinstance(value, str):  # encoded twice
            check_json_limits(value.encode("utf-8", "surrogatepass"), what="its JSON", param=path)
            inner = _decoded(value)
            value = inner if isinstance(inner, dict) else value
    if isinstance(value, dict):
        return value
    is_empty = value is None or (isinstance(value, str) and not value.strip())
    return {} if is_empty else {OTHER_VALUE: value}


def _decoded(text: str) -> Any:
    """The value of a JSON text; an object that is cut off is completed, other text stays text."""
    try:
        return decoded(text)
    except (ValueError, RecursionError):
        completed = completed_object(text)
        return text if completed is None else completed
