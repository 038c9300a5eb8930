"""Bytes of a log: opened, decompressed, as UTF-8; what cannot be a log is refused with a reason."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import sys
import zlib
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from pathlib import Path
from typing import IO, Any, Protocol

from ramify.analysis.files.log_paths import STDIN
from ramify.errors import LogError
from ramify.reasons import reason_of

CHUNK_BYTES = 1 << 20
MAX_VALUE_BYTES = 1 << 27  # of a line or value: no API takes a request of this size
TOO_LONG = f"longer than {MAX_VALUE_BYTES >> 20} MiB"
PARQUET = b"PAR1"
_DISK_BYTES = 1 << 17  # read from a file at once
_CONVERT = "convert it to JSON Lines first"
_REFUSED = (
    *((bytes((0x80, version)), "a pickle, which can run code when it is read") for version in range(2, 6)),
    (b"SQLite format 3\x00", "an SQLite database"),
    (b"PK\x03\x04", "a zip archive"),
    (b"ARROW1", "an Arrow file"),
    (b"\x7fELF", "a program"),
    (b"%PDF", "a PDF"),
)  # fmt: skip


class _Readable(Protocol):
    def read1(self, size: int, /) -> bytes: ...


def open_file(file: Path | str) -> AbstractContextManager[IO[bytes]]:
    """Open a file, or standard input for "-", which stays open afterwards.

    Raises:
        LogError: it cannot be opened.
    """
    if file == STDIN:
        return nullcontext(sys.stdin.buffer)
    try:
        return Path(file).open("rb", buffering=0)
    except OSError as error:
        raise LogError(
            f"{file} cannot be opened: {reason_of(error, file)}; check its permissions"
        ) from None


class LogStream(io.RawIOBase):
    """The bytes of an open file, decompressed.

    Ends where compressed data is cut or damaged, which `is_truncated` tells afterwards.

    Args:
        file: see `open_file`.
        name: of the file, for messages.
        advance: called with each number of bytes read from disk.

    Raises:
        LogError: the file is of a kind that is refused.
    """

    def __init__(self, file: IO[bytes], name: str, advance: Callable[[int], None]) -> None:
        self._name = name
        disk: io.BufferedReader[Any] = io.BufferedReader(_CountedFile(file, advance), _DISK_BYTES)
        head = disk.peek(16)[:16]
        for magic, kind in _REFUSED:
            if head.startswith(magic):
                raise LogError(f"{name} is {kind}; {_CONVERT}")
        self._stream = _decompressed(disk, head, name)
        self.is_parquet = head.startswith(PARQUET)
        self.is_truncated = False
        self.num_line_ends = 0  # of what was read

    def readable(self) -> bool:
        """As of every stream that is read."""
        return True

    def readinto(self, buffer: Any, /) -> int:
        """Fill the whole buffer, less at the end."""
        view, filled = memoryview(buffer), 0
        while filled < len(view):
            chunk = self._read(len(view) - filled)
            if not chunk:
                break
            view[filled : filled + len(chunk)] = chunk
            filled += len(chunk)
            self.num_line_ends += chunk.count(b"\n")
        return filled

    def _read(self, size: int) -> bytes:
        if self.is_truncated:
            return b""
        try:
            return self._stream.read1(size)
        except (EOFError, UnicodeError, zlib.error, lzma.LZMAError):
            pass
        except OSError as error:
            if error.errno is not None:
                raise LogError(
                    f"{self._name} cannot be read: {reason_of(error, self._name)}"
                ) from None
        self.is_truncated = True
        return b""


class _CountedFile(io.RawIOBase):
    """A file that tells how many bytes were read from it."""

    def __init__(self, file: IO[bytes], advance: Callable[[int], None]) -> None:
        self._file: Any = file
        self._advance = advance

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        size = int(self._file.readinto(buffer) or 0)
        self._advance(size)
        return size


def _decompressed(file: io.BufferedReader, head: bytes, name: str) -> _Readable:
    if head.startswith(b"\x1f\x8b"):
        return gzip.GzipFile(fileobj=file)
    if head.startswith(b"BZh"):
        return bz2.BZ2File(file)
    if head.startswith(b"\xfd7zXZ\x00"):
        return lzma.LZMAFile(file)
    if head.startswith(b"\x28\xb5\x2f\xfd") or head[1:4] == b"\x2a\x4d\x18":
        return io.BufferedReader(_ZstdFrames(file, name))
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return _Utf16(file)
    return file


class _ZstdFrames(io.RawIOBase):
    """Frames of zstd one after another; the library's stream does not tell that the last one is cut."""

    def __init__(self, file: io.BufferedReader, name: str) -> None:
        try:
            import zstandard
        except ImportError:
            raise LogError(
                f'{name} is compressed by zstd; pip install "ramify[analysis]" to read it'
            ) from None
        self._file, self._error = file, zstandard.ZstdError
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)
        self._texts = self._frames()
        self._text = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        while not self._text:
            text = next(self._texts, None)
            if text is None:
                return 0
            self._text = memoryview(text)
        size = min(len(buffer), len(self._text))
        buffer[:size], self._text = self._text[:size], self._text[size:]
        return size

    def _frames(self) -> Iterator[bytes]:
        data = b""
        while data := data or self._file.read1(1 << 14):
            frame = self._decompressor.decompressobj()
            while not frame.eof:
                try:
                    yield frame.decompress(data)
                except self._error as error:
                    raise EOFError from error
                data = frame.unused_data if frame.eof else self._file.read1(1 << 14)
                if not data and not frame.eof:
                    raise EOFError


class _Utf16:
    """Text in UTF-16, as PowerShell redirects it, as UTF-8."""

    def __init__(self, file: io.BufferedReader) -> None:
        self._file = file
        self._decoder = getincrementaldecoder("utf-16")()
        self._text = b""

    def read1(self, size: int, /) -> bytes:
        data = None
        while not self._text and data != b"":
            data = self._file.read1(_DISK_BYTES)
            self._text = self._decoder.decode(data, final=not data).encode("utf-8")
        text, self._text = self._text[:size], self._text[size:]
        return text


def numbered_lines(
    source: io.BufferedReader, *, start: int = 1, max_bytes: int = MAX_VALUE_BYTES
) -> Iterator[tuple[int, bytes | None]]:
    """The number and the bytes of each line, without its end; None for a line over the limit."""
    for number in count(start):
        line = source.readline(max_bytes + 1)
        if not line:
            return
        if len(line) <= max_bytes or line.endswith(b"\n"):
            yield number, line.removesuffix(b"\n").removesuffix(b"\r")
            continue
        while line and not line.endswith(b"\n"):
            line = source.readline(CHUNK_BYTES)
        yield number, None
