"""`StrictConnection`: h11 without framing that a proxy in front may read differently."""

from __future__ import annotations

import re
from typing import Any

import h11

END_OF_HEAD = re.compile(rb"\n\r?\n")
BAD_LINE_END = re.compile(rb"(?<!\r)\n|\n[ \t]")


class StrictConnection(h11.Connection):
    """h11's parser; refuses what a proxy in front may read differently (RFC 9112, 2.2, 5.2, 6.1).

    That is: a line of the head that ends with a bare LF or is folded, Content-Length beside
    Transfer-Encoding, and Transfer-Encoding in HTTP/1.0.
    """

    def next_event(self) -> Any:
        """See `h11.Connection`."""
        unread = self.trailing_data[0] if self.their_state is h11.IDLE else b""
        event = super().next_event()
        if isinstance(event, h11.Request):
            names = {name for name, _ in event.headers}
            if b"transfer-encoding" in names and (
                b"content-length" in names or event.http_version < b"1.1"
            ):
                raise h11.RemoteProtocolError("ambiguous length of the body")
            end = END_OF_HEAD.search(unread)
            if end is None or BAD_LINE_END.search(unread, 0, end.end()):
                raise h11.RemoteProtocolError("a folded line, or one that ends with a bare LF")
        return event
