"""The reasons of failed reads and writes, in the words of messages: no error number, no Python."""

from __future__ import annotations

import json
import os
import tomllib


def reason_of(error: BaseException, named: str | os.PathLike[str] | None = None) -> str:
    """Why a file, a connection or a document failed, to follow the colon of a message.

    Args:
        named: the path that the message names; another path in the error is added to the reason.
    """
    if isinstance(error, OSError):
        return _system_reason(error, named)
    if isinstance(error, UnicodeDecodeError):
        return f"it is not {error.encoding.upper()}: byte {error.object[error.start]:#04x} at {error.start:,}"
    if isinstance(error, json.JSONDecodeError):
        problem = error.msg.removesuffix(" at").replace("Expecting", "Expected")
        return f"it is not JSON: {problem} at line {error.lineno}, column {error.colno}"
    if isinstance(error, tomllib.TOMLDecodeError):
        return f"it is not TOML: {error}"
    if isinstance(error, KeyError) and error.args:
        return f"it has no {error.args[0]!r}"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return str(error) or type(error).__name__


def _system_reason(error: OSError, named: str | os.PathLike[str] | None) -> str:
    """Of the operating system, a name server or a library that reports through `OSError`."""
    cause = getattr(error, "reason", None)  # of urllib
    if isinstance(cause, OSError):
        return _system_reason(cause, named)
    if error.errno is None or not error.strerror:
        return str(cause or error) or type(error).__name__
    path = error.filename
    if not isinstance(path, str | bytes) or (named is not None and _same(path, named)):
        return error.strerror
    return f"{os.fsdecode(path)}: {error.strerror}"


def _same(path: str | bytes, named: str | os.PathLike[str]) -> bool:
    return os.path.normpath(os.fsdecode(path)) == os.path.normpath(os.fspath(named))
