"""Files of a log: found, opened and decompressed; what cannot be a log is refused with a reason."""

from __future__ import annotations

import bz2
import codecs
import lzma
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from os import PathLike
from pathlib import Path
from typing import IO, Any, Protocol

from ramify.errors import LogError

STDIN = "-"
_SUFFIXES = frozenset(".json .jsonl .ndjson .csv .tsv .har .log .txt .parquet".split())
_COMPRESSED = frozenset(".gz .zst .bz2 .xz".split())
_CONVERT = "convert it to JSON Lines first"
_REFUSED = (
    *((bytes((0x80, version)), "a pickle, which can run code when it is read") for version in range(2, 6)),
    (b"SQLite format 3\x00", "an SQLite database"),
    (b"PK\x03\x04", "a zip archive"),
    (b"ARROW1", "an Arrow file"),
    (b"\x7fELF", "a program"),
    (b"%PDF", "a PDF"),
)  # fmt: skip
PARQUET = b"PAR1"
_UTF16 = (b"\xff\xfe", b"\xfe\xff")

Progress = Callable[[int, int | None], None]  # bytes read of all files, their sum if it is known


class TruncatedFileError(Exception):
    """The compressed data ends too early or is damaged."""


class _Stream(Protocol):
    def read(self, size: int = -1, /) -> bytes: ...


def find_files(paths: Iterable[str | PathLike[str]]) -> Iterator[Path | str]:
    """Each file, those of directories by name and only with a suffix of a log; "-" is stdin.

    Raises:
        LogError: there is no such file, or a directory holds none.
    """
    for path in paths:
        if str(path) == STDIN:
            yield STDIN
            continue
        entry = Path(path)
        if entry.is_dir():
            logs = sorted(file for file in entry.rglob("*") if _is_log(file))
            if not logs:
                known = " ".join(sorted(_SUFFIXES))
                raise LogError(
                    f"{entry} has no file with a suffix of a log ({known}); name the files"
                )
            yield from logs
        elif entry.exists():
            yield entry
        else:
            raise LogError(
                f"{entry} does not exist; give files, directories or - for standard input"
            )


def _is_log(file: Path) -> bool:
    suffixes = [suffix.lower() for suffix in file.suffixes]
    if suffixes and suffixes[-1] in _COMPRESSED:
        suffixes.pop()
    return bool(suffixes) and suffixes[-1] in _SUFFIXES and file.is_file()


def total_bytes(files: Iterable[Path | str]) -> int | None:
    """Bytes of all files as stored; None with standard input."""
    total = 0
    for file in files:
        if isinstance(file, str):
            return None
        total += file.stat().st_size
    return total


class CountedFile:
    """A file that is read from its start, with a count of the bytes taken."""

    def __init__(self, file: Path | str, advance: Callable[[int], None]) -> None:
        self.name = str(file)
        self._advance = advance
        self._stream: IO[bytes]
        if isinstance(file, str):
            self._stream = sys.stdin.buffer
        else:
            try:
                self._stream = file.open("rb", buffering=0)
            except OSError as error:
                raise LogError(
                    f"{file} cannot be opened: {error.strerror}; check its permissions"
                ) from None
        self._head = b""

    def peek(self, size: int) -> bytes:
        """The first bytes of what was not read."""
        while len(self._head) < size:
            chunk = self._stream.read(size - len(self._head))
            if not chunk:
                break
            self._head += chunk
        return self._head[:size]

    def read(self, size: int = -1, /) -> bytes:
        """At most `size` bytes, as `io.RawIOBase.read`."""
        if self._head:
            size = len(self._head) if size < 0 else size
            chunk, self._head = self._head[:size], self._head[size:]
        else:
            chunk = self._stream.read(size) or b""
        self._advance(len(chunk))
        return chunk

    def close(self) -> None:
        """Close the file; standard input stays open."""
        if self.name != STDIN:
            self._stream.close()


class LogStream:
    """Bytes of a file after decompression.

    Raises:
        LogError: the file is of a kind that is refused.
    """

    def __init__(self, file: CountedFile) -> None:
        self._file = file
        head = file.peek(16)
        self._stream = self._open(head)
        for magic, kind in _REFUSED:
            if head.startswith(magic):
                raise LogError(f"{file.name} is {kind}; {_CONVERT}")
        self.is_parquet = head.startswith(PARQUET)

    def _open(self, head: bytes) -> _Stream:
        if head.startswith(b"\x1f\x8b"):
            return _Frames(self._file, lambda: zlib.decompressobj(wbits=31), 1 << 17)
        if head.startswith(b"BZh"):
            return _Frames(self._file, bz2.BZ2Decompressor, 1 << 15)
        if head.startswith(b"\xfd7zXZ\x00"):
            return _Frames(self._file, lzma.LZMADecompressor, 1 << 15)
        if head.startswith(b"\x28\xb5\x2f\xfd") or head[1:4] == b"\x2a\x4d\x18":
            return _Frames(self._file, _zstd_frame(self._file.name), 1 << 14)
        if head.startswith(_UTF16):
            return _Utf16(self._file, "utf-16")
        return self._file

    def read(self, size: int, /) -> bytes:
        """At most `size` bytes; none at the end.

        Raises:
            TruncatedFileError: the compressed data is cut or damaged.
        """
        try:
            return self._stream.read(size)
        except UnicodeError:
            raise TruncatedFileError from None
        except OSError as error:
            raise LogError(f"{self._file.name} cannot be read: {error.strerror}") from None


class _Utf16:
    """Text in UTF-16, as PowerShell redirects it, as UTF-8."""

    def __init__(self, file: CountedFile, encoding: str) -> None:
        self._file = file
        self._decoder = codecs.getincrementaldecoder(encoding)()

    def read(self, size: int = -1, /) -> bytes:
        while True:
            data = self._file.read(size)
            text = self._decoder.decode(data, final=not data)
            if text or not data:
                return text.encode("utf-8", "surrogatepass")


class _Frame(Protocol):
    """A decompressor of the data up to the end of a frame."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, /) -> bytes: ...


class _Frames:
    """Compressed frames one after another.

    Gives all data before a cut or a damage, which the readers of the libraries do not.
    """

    def __init__(self, file: CountedFile, new_frame: Callable[[], _Frame], read_bytes: int) -> None:
        self._file, self._new_frame, self._read_bytes = file, new_frame, read_bytes
        self._frame = new_frame()
        self._rest = b""
        self._is_inside = False

    def read(self, _size: int = -1, /) -> bytes:
        """Some bytes, possibly more than asked for; none at the end."""
        while True:
            data = self._rest or self._file.read(self._read_bytes)
            self._rest = b""
            if not data:
                if self._is_inside:
                    raise TruncatedFileError
                return b""
            if not self._is_inside and not data.strip(b"\x00"):
                continue  # padding behind a frame
            self._is_inside = True
            try:
                text = self._frame.decompress(data)
            except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError):
                raise TruncatedFileError from None
            if self._frame.eof:
                self._rest = self._frame.unused_data
                self._frame = self._new_frame()
                self._is_inside = False
            if text:
                return text


def _zstd_frame(name: str) -> Callable[[], _Frame]:
    try:
        import zstandard
    except ImportError:
        raise LogError(
            f'{name} is compressed by zstd; pip install "ramify[analysis]" to read it'
        ) from None
    decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)
    return lambda: _ZstdFrame(decompressor.decompressobj(), zstandard.ZstdError)


class _ZstdFrame:
    """A frame of zstd whose errors are ValueErrors."""

    def __init__(self, frame: Any, error: type[Exception]) -> None:
        self._frame, self._error = frame, error

    @property
    def eof(self) -> bool:
        return bool(self._frame.eof)

    @property
    def unused_data(self) -> bytes:
        return bytes(self._frame.unused_data)

    def decompress(self, data: bytes, /) -> bytes:
        try:
            return bytes(self._frame.decompress(data))
        except self._error as error:
            raise ValueError from error
