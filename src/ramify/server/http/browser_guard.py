"""Refuse cross-site requests of browsers (CSRF, DNS rebinding) to a server without keys.

A page cannot read an answer of another origin, but it can send requests, and by DNS rebinding its own
host name can be made to mean this machine.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ramify.server.errors import ApiError
from ramify.server.http.wire import log_safe

LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "[::1]")
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
# The types that a page may send to another site without asking it first.
FORM_TYPES = ("application/x-www-form-urlencoded", "multipart/form-data", "text/plain")

_HOST = re.compile(r"(\[[^\]]*\]|[^:\[\]]*?)\.?(?::[0-9]*)?")


@dataclass(frozen=True, slots=True)
class BrowserRules:
    """Which Host and Origin headers a server takes.

    Args:
        hosts: names without port, IPv6 addresses in brackets, `*.example.com` for all below; None:
            any.
        origins: `https://example.com:8443`, beside the server's own; "*": any. None: not checked.
    """

    hosts: frozenset[str] | None = None
    origins: frozenset[str] | None = None

    @classmethod
    def of(cls, hosts: Collection[str] | None, origins: Collection[str] | None) -> BrowserRules:
        """Rules from names as people write them."""
        return cls(
            None if hosts is None or "*" in hosts else frozenset(map(_host_name, hosts)),
            None if origins is None or "*" in origins else frozenset(map(origin_name, origins)),
        )

    def check(self, method: str, headers: Headers) -> None:
        """Raise ApiError for a request that may come from a page of another site.

        403 for its Host or Origin, 415 for a form from a browser. Clients that are no browsers send
        neither Origin nor Referer nor Sec-Fetch-Site; of them only Host is checked.
        """
        for host in headers.getlist("host"):
            if not self._is_allowed_host(_host_name(host)):
                raise ApiError(
                    403,
                    f"this server does not answer for the host {log_safe(host)}; start it with "
                    "--allowed-hosts if that name is meant",
                    code="host_not_allowed",
                )
        if self.origins is None:
            return
        origin = headers.get("origin")
        site = headers.get("sec-fetch-site", "none")
        is_foreign = (
            not self._is_allowed_origin(origin, headers.get("host", ""))
            if origin is not None
            else site in ("cross-site", "same-site") and method not in SAFE_METHODS
        )
        if is_foreign:
            raise ApiError(
                403,
                f"pages of {log_safe(origin or 'another site')} may not call this server; start it "
                "with --allowed-origins if that is meant",
                code="origin_not_allowed",
            )
        content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
        is_browser = origin is not None or "sec-fetch-site" in headers or "referer" in headers
        if is_browser and method not in SAFE_METHODS and content_type in FORM_TYPES:
            raise ApiError(415, "send JSON, with Content-Type: application/json")

    def _is_allowed_host(self, name: str) -> bool:
        if self.hosts is None or name in self.hosts:
            return True
        return any(host.startswith("*.") and name.endswith(host[1:]) for host in self.hosts)

    def _is_allowed_origin(self, origin: str, host: str) -> bool:
        origin = origin.lower()
        return origin in (self.origins or ()) or origin.partition("://")[2] == host.lower() != ""


def origin_name(origin: str) -> str:
    """An origin as browsers send it, from one as people write it: `https://App.example/`."""
    return origin.lower().rstrip("/")


def _host_name(host: str) -> str:
    """The name of a Host header, without port, in lower case; all of it if it is malformed."""
    host = host.strip().lower()
    if host.count(":") > 1 and not host.startswith("["):
        return f"[{host}]"  # an IPv6 address, as in --host
    match = _HOST.fullmatch(host)
    return host if match is None else match[1]


class BrowserGuard:
    """ASGI middleware that answers what `rules` refuse, before anything else looks at it.

    Args:
        refuse: the response to a refused request.
    """

    def __init__(
        self, app: ASGIApp, rules: BrowserRules, refuse: Callable[[Scope, ApiError], Response]
    ) -> None:
        self._app, self._rules, self._refuse = app, rules, refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] == "http":
            try:
                self._rules.check(scope["method"], Headers(scope=scope))
            except ApiError as error:
                await self._refuse(scope, error)(scope, receive, send)
                return
        await self._app(scope, receive, send)
