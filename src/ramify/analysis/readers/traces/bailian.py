"""Qwen-Bailian usage traces: times in seconds, blocks of 16 tokens, turns linked by chat ids."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ramify.analysis.reader import BadRowError, LogFormat, ReadQuality, Row, RowReader
from ramify.analysis.readers.row_values import get_count, get_name, get_number, mapping_of
from ramify.analysis.readers.traces.hashed_prompts import BlockSizes, FileScopes, block_ids_of
from ramify.analysis.records import LoggedRequest, Usage

BLOCK_SIZE = 16
ROOT = "-1"  # parent of a first turn


def is_bailian(value: Any) -> bool:
    """Whether a row has the ids of a chat and of its blocks."""
    return isinstance(value, Mapping) and "chat_id" in value and "hash_ids" in value


class BailianReader(RowReader):
    """Reads rows; a conversation is named by the chat id of its first turn."""

    def __init__(self, quality: ReadQuality) -> None:
        self._sizes = BlockSizes(BLOCK_SIZE, quality)
        self._scopes = FileScopes(quality)
        self._roots: dict[str, str] = {}  # first turn of each chat that is no first turn

    def feed(self, row: Row) -> Iterator[LoggedRequest]:
        """See `RowReader`."""
        value = mapping_of(row.value, "row")
        chat = get_name(value, "chat_id")
        if chat is None:
            raise BadRowError("row has no chat_id")
        parent = get_name(value, "parent_chat_id")
        if parent == ROOT:
            parent = None
        num_tokens = get_count(value, "input_length")
        hashed = self._sizes.prompt(
            row.file, block_ids_of(value.get("hash_ids")), num_tokens, value.get("block_size")
        )
        request = LoggedRequest(
            *row.place,
            hashed=hashed,
            request_id=chat,
            conversation=chat if parent is None else self._roots.get(parent, parent),
            parent_id=parent,
            start_s=get_number(value, "timestamp"),
            cache_scope=self._scopes.scope(row.file),
            usage=Usage(num_input=num_tokens, num_output=get_count(value, "output_length")),
        )
        if request.conversation is not None and parent is not None:
            self._roots[chat] = request.conversation
        yield request


BAILIAN = LogFormat("bailian", is_bailian, BailianReader)
