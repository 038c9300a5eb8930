"""`Link`: a server's side of one connection to a replica."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from typing import Any

from ramify.cluster.credentials import Credentials, import_grpc
from ramify.cluster.wire import (
    DEAD_S,
    MAX_MESSAGE_BYTES,
    MAX_UNSENT_BYTES,
    METHOD,
    PING_S,
    PROTOCOL_VERSION,
    FromReplica,
    FromServer,
    Hello,
    Ping,
    Pong,
    Refused,
    Welcome,
    WireError,
    decode_from_replica,
    encode,
)
from ramify.errors import RamifyError

logger = logging.getLogger(__name__)

# A peer that has gone without a word is noticed by HTTP/2's pings; `ping_timeout_ms` is what ends the
# connection: without it a hung peer was noticed after 60 s.
CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 4000),
    ("grpc.http2.ping_timeout_ms", 4000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.use_local_subchannel_pool", 1),
)
REST_S = 1.0  # to read what a replica has sent that takes no more messages
# In gRPC's words, which come with the status of any failed connection.
TLS_FAILURES = ("handshake", "Hostname Verification")


class LinkError(RamifyError):
    """There is no connection to a replica, or it has ended; the text says why."""


class RefusedError(LinkError):
    """A replica and this server do not fit each other: another try would end in the same way."""


class Link:
    """A connection: `open`, then `run` until it ends. For one event loop.

    Args:
        address: host and port of the replica.
        receive: gets each message.
    """

    def __init__(
        self,
        address: str,
        receive: Callable[[FromReplica], None],
        credentials: Credentials,
        *,
        ping_s: float = PING_S,
        dead_s: float = DEAD_S,
    ) -> None:
        self.address, self._receive, self._credentials = address, receive, credentials
        self._ping_s, self._dead_s = ping_s, dead_s
        self._channel: Any = None
        self._call: Any = None
        # A failed write ends the call's `read`, but not its iterator: what the replica has sent before its
        # end is still read, then the status says why. gRPC keeps a call whose messages nobody reads for
        # ever (grpc/grpc#36066).
        self._messages: AsyncGenerator[bytes, None] | None = None
        self._outbox: deque[bytes] = deque()
        self._num_unsent = 0
        self._has_unsent = asyncio.Event()
        self._is_over = asyncio.Event()
        self._reason = ""
        self._last_s = 0.0  # of the last message

    async def open(self, hello: Hello, timeout_s: float = DEAD_S) -> Welcome:
        """Connect and exchange hellos.

        Raises:
            RefusedError: the replica refuses this server, or the secret is wrong.
            LinkError: nobody answers in time, or what answers is no replica.
        """
        try:
            return await self._exchange(hello, timeout_s)
        except BaseException:  # also of a server that ends meanwhile
            await self.close()
            raise

    async def _exchange(self, hello: Hello, timeout_s: float) -> Welcome:
        grpc = import_grpc()
        if self._credentials.has_tls:
            options = (*CHANNEL_OPTIONS, *self._credentials.channel_options())
            self._channel = grpc.aio.secure_channel(
                self.address, self._credentials.channel_credentials(), options=options
            )
        else:
            self._channel = grpc.aio.insecure_channel(self.address, options=CHANNEL_OPTIONS)
        self._call = self._channel.stream_stream(METHOD)(metadata=self._credentials.metadata())
        self._messages = aiter(self._call)
        try:
            async with asyncio.timeout(timeout_s):
                # Where it had ended before the hello was written, its status says why.
                with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    await self._call.write(encode(hello))
                body = await anext(self._messages, None)
            if body is None:
                raise self._ended(await self._call.code(), await self._call.details())
            message = decode_from_replica(body)
        except TimeoutError:
            raise LinkError(f"{self.address} did not answer within {timeout_s:g} s") from None
        except grpc.aio.AioRpcError as error:
            raise self._ended(error.code(), error.details()) from None
        except WireError as error:
            raise RefusedError(f"{self.address} is no replica: {error}") from error
        if isinstance(message, Refused):
            raise RefusedError(f"{self.address} refuses this server: {message.reason}")
        if not isinstance(message, Welcome):
            raise RefusedError(f"{self.address} answers with a {type(message).__name__}")
        if message.protocol_version != PROTOCOL_VERSION:
            raise RefusedError(
                f"{self.address}: protocol_version is {message.protocol_version} at the replica and "
                f"{PROTOCOL_VERSION} at the server"
            )
        return message

    def _ended(self, code: Any, details: str | None) -> LinkError:
        grpc = import_grpc()
        text = f"{self.address}: {details or 'the connection was closed'}"
        if self._credentials.has_tls and any(sign in text for sign in TLS_FAILURES):
            name = self._credentials.name
            wanted = "name the address at which servers reach it, or have the name of"
            if name is not None:
                wanted = f"have the name {name!r} of"
            return RefusedError(
                f"{text}; both sides need certificates of one authority, and the replica's must {wanted} "
                "--cluster-certificate-name (`tls.name` of a deployment)"
            )
        if not self._credentials.has_tls and "Socket closed" in text:
            return LinkError(f"{text}; a replica with certificates lets no server in without")
        refusals = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED)
        return (RefusedError if code in refusals else LinkError)(text)

    def send(self, message: FromServer) -> None:
        """Queue a message; never waits.

        Raises:
            WireError: it is too large.
        """
        body = encode(message)
        self._outbox.append(body)
        self._num_unsent += len(body)
        self._has_unsent.set()
        if self._num_unsent > MAX_UNSENT_BYTES + MAX_MESSAGE_BYTES:
            self.end(f"{self._num_unsent:,} bytes could not be sent: the replica reads too slowly")

    def end(self, reason: str) -> None:
        """Let `run` return."""
        self._reason = self._reason or reason
        self._is_over.set()

    async def run(self) -> str:
        """Read and write until the connection ends; returns why it did. The replica may live on."""
        self._last_s = time.monotonic()
        tasks = [
            asyncio.ensure_future(work)
            for work in (self._read(), self._write(), self._ping(), self._wait_for_end())
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return self._reason or next(iter(done)).result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.close()

    async def close(self) -> None:
        """Close the connection; nothing is received any more."""
        if self._call is not None:
            self._call.cancel()
        if self._messages is not None:
            await self._messages.aclose()
        if self._channel is not None:
            channel, self._channel = self._channel, None
            await channel.close()

    async def _wait_for_end(self) -> str:
        await self._is_over.wait()
        return self._reason

    async def _read(self) -> str:
        assert self._messages is not None, "open comes first"
        grpc = import_grpc()
        try:
            async for body in self._messages:
                self._last_s = time.monotonic()
                message = decode_from_replica(body)
                if not isinstance(message, Pong):
                    self._receive(message)
                if self._is_over.is_set():
                    return self._reason
            return "the replica has closed the connection"
        except grpc.aio.AioRpcError as error:
            return str(error.details() or error.code())
        except WireError as error:
            return str(error)

    async def _write(self) -> str:
        grpc = import_grpc()
        try:
            while True:
                await self._has_unsent.wait()
                while self._outbox:
                    body = self._outbox.popleft()
                    await self._call.write(body)
                    self._num_unsent -= len(body)
                self._has_unsent.clear()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            await asyncio.sleep(REST_S)
            details = getattr(error, "details", str)()
            return str(details or "the connection was closed")

    async def _ping(self) -> str:
        number = 0
        while True:
            begin_s = time.monotonic()
            await asyncio.sleep(self._ping_s)
            now_s = time.monotonic()
            if (
                now_s - begin_s > 2 * self._ping_s
            ):  # this side was stopped: it may not have read yet
                self._last_s = now_s
            silent_s = now_s - self._last_s
            if silent_s > self._dead_s:
                return f"no sign of life for {silent_s:.1f} s"
            number += 1
            self.send(Ping(number))
