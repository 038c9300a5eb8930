"""Token ids: `[1, 2, 3]`, `{"token_ids": […]}` or `{"prompt_token_ids": […]}` a row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from ramify.analysis.reader import BadRowError, LogFormat, ReadQuality, Row
from ramify.analysis.readers.bodies.segments import token_segment
from ramify.analysis.readers.row_values import RowByRow, get_name, get_number, ids_of, quoted
from ramify.analysis.records import LoggedRequest

ID_FIELDS = ("token_ids", "prompt_token_ids", "input_ids")
NOT_TOKENS = ("messages", "prompt", "hash_ids", "event", "obj")


def is_token_ids(value: Any) -> bool:
    """Whether a row is an array of integers, or an object with such an array and no prompt."""
    if isinstance(value, list):
        return bool(value) and all(type(item) is int for item in value[:16])
    if not isinstance(value, Mapping) or any(name in value for name in NOT_TOKENS):
        return False
    return any(isinstance(value.get(name), list) for name in ID_FIELDS)


def read_token_ids(row: Row, quality: ReadQuality) -> Iterator[LoggedRequest]:
    """A request for a row; an empty array is none."""
    value = row.value
    if isinstance(value, list):
        fields: Mapping[str, Any] = {"token_ids": value}
    elif isinstance(value, Mapping):
        fields = value
    else:
        raise BadRowError(f"row is {quoted(value)}, not token ids")
    name = next((name for name in ID_FIELDS if fields.get(name) is not None), None)
    if name is None:
        raise BadRowError(f"row has none of {', '.join(ID_FIELDS)}")
    ids = ids_of(fields[name], name)
    if not ids:
        quality.skipped["empty prompt"] += 1
        return
    yield LoggedRequest(
        *row.place,
        segments=(token_segment(ids),),
        request_id=get_name(fields, "id"),
        conversation=get_name(fields, "session_id"),
        start_s=get_number(fields, "start_s"),
    )


TOKEN_IDS = LogFormat("token-ids", is_token_ids, partial(RowByRow, read_token_ids))
