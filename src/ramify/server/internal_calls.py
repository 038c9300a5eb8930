"""Requests that the server sends to itself: the same handlers and bodies as over HTTP, without a socket."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.types import Message, Scope


def internal_request(path: str, body: bytes) -> Request:
    """A POST request with a JSON body, whose client never disconnects."""
    scope: Scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ],
        "client": None,
        "server": None,
    }
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if messages:
            return messages.pop()
        await asyncio.Event().wait()
        raise AssertionError("nothing sets the event")

    return Request(scope, receive)
