"""`Batches`: what the endpoints of files and batches need, and what they have in common."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from ramify.server.batches.records import BatchRecord, StoredFile
from ramify.server.batches.runner import BatchRunner
from ramify.server.batches.store import BatchStore
from ramify.server.context import RequestContext
from ramify.server.errors import ApiError
from ramify.server.http.wire import whole_number

READ_BYTES = 1 << 18
R = TypeVar("R", StoredFile, BatchRecord)


@dataclass(frozen=True, slots=True)
class Batches:
    """Files and batches of a server that has a directory for them."""

    store: BatchStore
    runner: BatchRunner


def batches_of(context: RequestContext) -> Batches:
    """The batches of the server.

    Raises:
        ApiError: 400, it has no directory for them.
    """
    batches = getattr(context.request.app.state, "batches", None)
    if not isinstance(batches, Batches):
        raise ApiError(
            400,
            "files and batches are off; start the server with --batch-dir DIR",
            code="batches_off",
        )
    return batches


def page_of(
    records: Sequence[R],
    query: Mapping[str, str],
    *,
    default: int,
    most: int,
    is_newest_first: bool = True,
) -> tuple[list[R], bool]:
    """A page of records, as `limit` and `after` ask for it; and whether there are more.

    Args:
        records: oldest first.
        default, most: of `limit`.

    Raises:
        ApiError: 400, a parameter is malformed or names no record.
    """
    text = query.get("limit", str(default))
    limit = whole_number(text, max_digits=6)
    if limit is None or not 1 <= limit <= most:
        raise ApiError(400, f"{text[:20]!r} is not a number from 1 to {most}", param="limit")
    ordered = list(records)[:: -1 if is_newest_first else 1]
    start = 0
    if (after := query.get("after")) is not None:
        start = 1 + index_of(ordered, after, "after")
    return ordered[start : start + limit], start + limit < len(ordered)


def index_of(records: Sequence[R], name: str, param: str) -> int:
    """The place of a record in a list.

    Raises:
        ApiError: 400, it is not there.
    """
    for index, record in enumerate(records):
        if record.id == name:
            return index
    raise ApiError(400, f"there is nothing with the id {name[:100]!r}", param=param)


def file_response(path: Path, media: str, headers: Mapping[str, str]) -> Response:
    """A response with the bytes that a file has now; its removal does not cut it off.

    Raises:
        FileNotFoundError: it is gone.
    """
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    num_bytes = os.fstat(handle).st_size

    async def body() -> AsyncGenerator[bytes]:
        offset = 0
        while offset < num_bytes:
            size = min(READ_BYTES, num_bytes - offset)
            piece = await asyncio.to_thread(os.pread, handle, size, offset)
            if not piece:
                return
            offset += len(piece)
            yield piece

    return _FileResponse(
        body(), handle, media_type=media, headers={**headers, "Content-Length": str(num_bytes)}
    )


class _FileResponse(StreamingResponse):
    """Closes the file when it was sent, or could not be."""

    def __init__(self, content: AsyncGenerator[bytes], handle: int, **options: object) -> None:
        super().__init__(content, **options)  # type: ignore[arg-type]
        self._handle = handle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it: the ASGI application."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            with suppress(OSError):
                os.close(self._handle)
