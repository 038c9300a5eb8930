"""Uploads: `multipart/form-data` with one file, which goes to disk as it comes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from starlette.requests import ClientDisconnect, Request

from ramify.server.batches.directory import DiskSpace, disk_error, write_all
from ramify.server.errors import ApiError
from ramify.server.http.wire import BODY_TIMEOUT_S, CLIENT_GONE

MAX_FILE_BYTES = 200 << 20
MAX_UPLOAD_S = 3600.0
MAX_PARTS, MAX_FIELD_BYTES = 32, 4096  # parts cost time in the event loop; bytes of a file little
MAX_BOUNDARY_CHARS = 200
WRITE_BYTES = 1 << 20  # written together
FILE_FIELD = "file"


@dataclass(slots=True)
class Form:
    """The fields of a form, and the file's name; the file's bytes are elsewhere."""

    fields: dict[str, str] = field(default_factory=dict)
    filename: str | None = None  # None: there was no file


class FileSink:
    """An open file that counts its bytes in a `DiskSpace` while it grows."""

    def __init__(self, handle: int, space: DiskSpace, tenant: str) -> None:
        self._handle, self._space, self._tenant = handle, space, tenant
        self.num_bytes = 0
        self._buffer = bytearray()

    def add(self, data: bytes) -> None:
        """Append bytes.

        Raises:
            ApiError: 413, the file is too large, or there is no room.
        """
        if self.num_bytes + len(data) > MAX_FILE_BYTES:
            raise ApiError(
                413,
                f"the file has more than {MAX_FILE_BYTES} bytes; make several",
                param=FILE_FIELD,
            )
        self._space.reserve(self._tenant, len(data))
        self.num_bytes += len(data)
        self._buffer += data

    async def flush(self, *, is_last: bool = False) -> None:
        """Write what has come, if it is enough; with the last, make it survive a loss of power.

        Raises:
            ApiError: 503, the disk is full.
            OSError: it failed in another way.
        """
        if not is_last and len(self._buffer) < WRITE_BYTES:
            return
        data, self._buffer = self._buffer, bytearray()

        def write() -> None:
            write_all(self._handle, data)
            if is_last:
                os.fsync(self._handle)

        writing = asyncio.ensure_future(asyncio.to_thread(write))
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            with suppress(OSError):  # the descriptor is closed next
                await writing
            raise
        except OSError as error:
            raise disk_error(error) from None


class _FormReader:
    """Callbacks of the parser: headers of parts, fields, bytes of the file."""

    def __init__(self, add_to_file: Callable[[bytes], None]) -> None:
        self.form, self.is_complete = Form(), False
        self._add_to_file = add_to_file
        self._name, self._num_parts = "", 0  # name of the part
        self._header, self._value, self._field = bytearray(), bytearray(), bytearray()

    def header_begin(self) -> None:
        self._header, self._value = bytearray(), bytearray()

    def header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def header_end(self) -> None:
        if bytes(self._header).lower() != b"content-disposition":
            return
        from python_multipart.multipart import parse_options_header

        _, options = parse_options_header(bytes(self._value))
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        if self._name == FILE_FIELD:
            if self.form.filename is not None:
                raise ApiError(400, "there are two files; send one", param=FILE_FIELD)
            self.form.filename = options.get(b"filename", b"").decode("utf-8", "replace")

    def part_begin(self) -> None:
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise ApiError(400, f"the form has more than {MAX_PARTS} parts; send purpose and file")
        self._name, self._field = "", bytearray()

    def part_data(self, data: bytes, start: int, end: int) -> None:
        if self._name == FILE_FIELD:
            self._add_to_file(data[start:end])
            return
        self._field += data[start:end]
        if len(self._field) > MAX_FIELD_BYTES:
            raise ApiError(
                400, f"the field has more than {MAX_FIELD_BYTES} bytes", param=self._name or None
            )

    def part_end(self) -> None:
        if self._name == FILE_FIELD:
            return
        if not self._name:
            raise ApiError(400, "a part of the form has no name")
        self.form.fields[self._name] = bytes(self._field).decode("utf-8", "replace")

    def end(self) -> None:
        self.is_complete = True


async def read_upload(request: Request, sink: FileSink) -> Form:
    """Read a form; its file goes into `sink` and is on disk when this returns.

    Raises:
        ApiError: 400 or 415, it is no such form, or the parser is not installed; 408, it does not
            come; 413, it is too large; 499, the client has gone; 503, the disk is full.
    """
    try:
        # Of everything that a server does, only this needs it.
        from python_multipart.exceptions import FormParserError
        from python_multipart.multipart import MultipartParser, parse_options_header
    except ImportError:
        raise ApiError(
            400, "uploads need a package on the server: pip install python-multipart"
        ) from None
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not 0 < len(boundary) <= MAX_BOUNDARY_CHARS:
        raise ApiError(415, "send multipart/form-data with the fields purpose and file")
    if request.headers.get("content-encoding", "identity") != "identity":
        raise ApiError(415, "compressed bodies are not supported")
    reader = _FormReader(sink.add)
    parser = MultipartParser(
        boundary,
        {
            "on_part_begin": reader.part_begin,
            "on_part_data": reader.part_data,
            "on_part_end": reader.part_end,
            "on_header_begin": reader.header_begin,
            "on_header_field": reader.header_field,
            "on_header_value": reader.header_value,
            "on_header_end": reader.header_end,
            "on_end": reader.end,
        },
    )
    try:
        async with asyncio.timeout(MAX_UPLOAD_S):
            chunks = aiter(request.stream())
            while True:
                async with asyncio.timeout(BODY_TIMEOUT_S):
                    chunk = await anext(chunks, None)
                if chunk is None:
                    break
                if chunk:
                    parser.write(chunk)
                    await sink.flush()
    except TimeoutError as error:
        raise ApiError(408, "the upload does not go on") from error
    except ClientDisconnect:
        raise ApiError(499, CLIENT_GONE) from None
    except FormParserError as error:
        raise ApiError(400, f"the form is malformed: {error}") from None
    if not reader.is_complete:
        raise ApiError(400, "the form is cut off: its last boundary is missing")
    if reader.form.filename is None:
        raise ApiError(400, "the form has no file", param=FILE_FIELD)
    await sink.flush(is_last=True)
    return reader.form
