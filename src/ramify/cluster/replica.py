"""`Replica`: an `AsyncLLM` behind a port, for any number of servers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

import ramify
from ramify.cache.events import Subscription
from ramify.cache.key import namespace_of
from ramify.cluster.codecs import encode_error
from ramify.cluster.connection import Connection
from ramify.cluster.credentials import Credentials, import_grpc
from ramify.cluster.wire import (
    MAX_MESSAGE_BYTES,
    METHOD,
    PROTOCOL_VERSION,
    Hello,
    Refused,
    ReplaceWeights,
    Return,
    Welcome,
    WireError,
    address_of,
    decode_from_server,
    encode,
)
from ramify.engine.async_llm import AsyncLLM
from ramify.engine.core import EngineCore
from ramify.engine.weight_reload import LoadedWeights
from ramify.errors import ConfigError, EngineStoppedError, RamifyError

logger = logging.getLogger(__name__)

HELLO_S = 10.0  # within which a connection must send its hello
STOP_S = 1.0  # for gRPC to end its streams, and for the hello of a peer that is refused
FLUSH_S = 5.0  # for a server to read what is left before its connection is ended
# A peer that has gone without a word is noticed by HTTP/2's pings; the third is what ends the
# connection: without it a hung peer was noticed after 60 s.
CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 4000),
    ("grpc.http2.ping_timeout_ms", 4000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
SERVER_OPTIONS = (
    *CHANNEL_OPTIONS,
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),
)


class Replica:
    """Serves the engine of an `AsyncLLM` to servers; ends neither with one of them.

    Args:
        llm: answers, and is used by nobody else.
        credentials: what servers must show.
        warm_up: computes prompts before servers can connect, and again with other weights.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        credentials: Credentials | None = None,
        *,
        warm_up: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._llm, self._credentials, self._warm_up = llm, credentials or Credentials(), warm_up
        self._connections: set[Connection] = set()
        self._updates: set[asyncio.Task[None]] = set()
        self._is_updating = self._is_draining = self._is_closed = False
        self._may_join = asyncio.Event()  # cleared while weights are replaced
        self._may_join.set()
        self._server: Any = None
        self._welcome: Welcome | None = None
        self._hashing: Subscription | None = None
        self.num_refused = 0  # connections: wrong secret, wrong hello
        self.num_broken = 0  # connections that ended with a broken message

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> int:
        """Listen; returns the port.

        Raises:
            ConfigError: the address cannot be bound, or is open to everybody without credentials.
            MissingPackageError: gRPC is not installed.
        """
        self._credentials.check_address(host)
        grpc = import_grpc()
        await self._prepare()
        server = grpc.aio.server(options=SERVER_OPTIONS)
        handler = grpc.stream_stream_rpc_method_handler(self._serve)
        service, _, method = METHOD.strip("/").partition("/")
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(service, {method: handler}),)
        )
        address = address_of(host, port)
        try:
            if self._credentials.has_tls:
                bound = server.add_secure_port(address, self._credentials.server_credentials())
            else:
                bound = server.add_insecure_port(address)
        except RuntimeError as error:
            raise ConfigError(f"a replica cannot listen at {address}: {error}") from error
        await server.start()
        self._server = server
        logger.info("replica %016x listens at %s:%d", self._llm.incarnation, host, bound)
        return int(bound)

    async def _prepare(self) -> None:
        """Give the cache the namespace that equal replicas share, and warm it up.

        What it has cached before is dropped.
        """
        if self._welcome is None:
            self._welcome = await self._make_welcome()
            if self._warm_up is not None:
                await self._warm_up()

    async def drain(self, timeout_s: float | None = None) -> bool:
        """Take no new requests, let the live ones finish, then end.

        After `timeout_s` the connections end first: servers go on with the rest elsewhere.

        Returns:
            whether all requests have finished.
        """
        self._is_draining = True
        for connection in self._connections:
            connection.drain()
        drained = asyncio.ensure_future(self._llm.drain())
        done, _ = await asyncio.wait((drained,), timeout=timeout_s)
        if done:
            await asyncio.gather(*(connection.flush(FLUSH_S) for connection in self._connections))
        await self.close()
        return await drained and bool(done)

    async def close(self) -> None:
        """End all connections and the engine; live requests are aborted."""
        self._is_closed = True
        for update in self._updates:
            update.cancel()
        await asyncio.gather(*self._updates, return_exceptions=True)
        for connection in list(self._connections):
            connection.fail("the replica was closed")
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(STOP_S)
        await self._llm.aclose()

    # -- other weights -----------------------------------------------------------------------

    async def replace_weights(self, model: str, expected: str = "") -> None:
        """Replace the weights by others of the same model, while no request is live.

        Requests go on while the weights load. Then servers send no more until the live ones have
        ended, the weights are installed, and prompts are warm. Connections go on with the identity
        of before, and take no requests: end them.

        Args:
            expected: digest of the identity that the weights replace; "": any.

        Raises:
            ConfigError: weights are being replaced already, or were since the caller has looked.
            ModelError, ConfigError: see `LocalEngine.load_weights`; nothing has changed.
        """
        if self._is_updating:
            raise ConfigError(
                f"the weights of this replica are being replaced; send {model!r} again when that has ended"
            )
        assert self._welcome is not None, "start comes first"
        if expected not in ("", self._welcome.identity.digest):
            raise ConfigError(
                f"the weights of this replica were replaced after the replacement by {model!r} began, as "
                f"another server does: their identity is {self._welcome.identity.digest} and not "
                f"{expected}; send {model!r} again when the other replacement has ended"
            )
        self._is_updating = True
        try:
            weights = await self._llm.load_weights(model)
            # Read before requests wait; it is remembered on disk.
            await asyncio.to_thread(weights.identity)
            self._may_join.clear()
            for connection in self._connections:
                connection.drain(is_update=True)
            await self._install(weights)
            logger.info("computes with the weights of %s", model)
            await self._warm_up_again()
        finally:
            self._is_updating = False
            self._may_join.set()

    async def _install(self, weights: LoadedWeights) -> None:
        """Install weights when no request is live. Whatever fails, the identity is that of the engine."""
        try:
            await self._llm.install_weights(weights)
        except Exception:
            # It may have failed after the weights were installed.
            await self._look_at_identity()
            raise
        await self._look_at_identity()

    async def _look_at_identity(self) -> None:
        """Let servers that connect know what the engine computes with."""
        try:
            self._welcome = await self._make_welcome()
        except EngineStoppedError:  # it ends already
            raise
        except Exception:
            # With a wrong identity, answers of other weights would go on here.
            logger.critical("what this replica computes with is not known any more: it ends")
            await self._llm.aclose()
            raise

    async def _warm_up_again(self) -> None:
        """Warm up with other weights, which are in use whether that succeeds or not."""
        if self._warm_up is None:
            return
        try:
            await self._warm_up()
        except RamifyError as error:
            logger.warning("prompts are not warm with the weights of now: %s", error)
        except Exception:
            logger.exception("prompts are not warm with the weights of now, by a bug")

    def _answer_replace(self, asker: Connection, message: ReplaceWeights) -> None:
        """Begin to answer a `ReplaceWeights`; goes on when the asker has gone."""
        update = asyncio.ensure_future(self._replace_and_answer(asker, message))
        self._updates.add(update)
        update.add_done_callback(self._updates.discard)

    async def _replace_and_answer(self, asker: Connection, message: ReplaceWeights) -> None:
        answer = Return(message.key)
        try:
            await self.replace_weights(message.model, message.expected)
        except Exception as error:
            if not isinstance(error, RamifyError):
                logger.exception("the weights of %s could not be installed", message.model)
            answer = Return(message.key, error=encode_error(error))
        asker.send(answer)
        for connection in list(self._connections):
            # One that is refused while another goes on leaves the connections to that one.
            if connection.awaits_weights and not self._is_updating:
                await connection.end(FLUSH_S)

    async def _make_welcome(self) -> Welcome:
        llm = self._llm
        identity = await llm.identity()
        # Of the content, not of the path: equal replicas on two machines have equal hashes.
        namespace = namespace_of(identity=identity.digest) if llm.description.path else None
        before = None if self._welcome is None else self._welcome.namespace

        def rename(core: EngineCore) -> bytes:
            if core.namespaces.base != before:
                core.cache.clear()  # nothing of it would be found
                core.namespaces.base = namespace or core.namespaces.base
            return core.namespaces.base

        base = await llm.run(rename)
        if self._hashing is None:
            # Pages are hashed as they are stored, whether a server is connected or not.
            self._hashing = await llm.run(lambda core: core.cache.subscribe(1))
        return Welcome(
            PROTOCOL_VERSION,
            llm.incarnation,
            ramify.__version__,
            identity,
            base,
            None if llm.tokenizer is None else llm.tokenizer.digest,
            llm.config,
            llm.description,
        )

    async def _serve(self, requests: AsyncIterator[bytes], context: Any) -> None:
        """Serve one connection until it ends; the handler of gRPC."""
        grpc, peer, messages = import_grpc(), context.peer(), aiter(requests)
        if not self._credentials.is_authentic(context.invocation_metadata() or ()):
            self.num_refused += 1
            logger.warning("refused %s: it did not send this cluster's secret", peer)
            # Where its hello cannot be written any more, gRPC shows it that in place of the reason.
            with suppress(TimeoutError):
                async with asyncio.timeout(STOP_S):
                    await anext(messages, None)
            await context.abort(
                grpc.StatusCode.UNAUTHENTICATED, "the secret of the cluster is missing or wrong"
            )
        try:
            failure = await self._serve_peer(messages, context.write, peer)
        except WireError as error:
            self.num_broken += 1
            logger.warning("%s: %s", peer, error)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        else:
            if failure is not None:
                logger.warning("%s: %s", peer, failure)
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, failure)

    async def _serve_peer(
        self,
        requests: AsyncIterator[bytes],
        write: Callable[[bytes], Awaitable[None]],
        peer: str,
    ) -> str | None:
        """Serve a peer until its stream ends; returns why this side has ended it, if it did.

        Raises:
            WireError: a message is broken.
        """
        reason = await self._refusal(requests)
        if reason is not None:
            self.num_refused += 1
            logger.warning("refused %s: %s", peer, reason)
            await write(encode(Refused(reason)))
            return None
        await self._may_join.wait()
        if self._is_closed:
            return "the replica was closed"
        assert self._welcome is not None
        welcome = encode(self._welcome)
        connection = Connection(self._llm, write, peer, self._answer_replace)
        self._connections.add(connection)
        try:
            # Nothing can come between the look at the weights and the entry above.
            await write(welcome)
            if self._is_draining:
                connection.drain()
            await connection.run(requests)
        except EngineStoppedError as error:
            return str(error)
        finally:
            self._connections.discard(connection)
            connection.close()
        return connection.failure

    async def _refusal(self, requests: AsyncIterator[bytes]) -> str | None:
        """Why a connection is refused, by its hello; None: it is not.

        Raises:
            WireError: the first message is broken, is no hello, or does not come.
        """
        try:
            async with asyncio.timeout(HELLO_S):
                body = await anext(requests, None)
        except TimeoutError:
            raise WireError(f"there was no hello within {HELLO_S:g} s") from None
        if body is None:
            raise WireError("the connection ended before its hello")
        hello = decode_from_server(body)
        if not isinstance(hello, Hello):
            raise WireError(f"the first message is a {type(hello).__name__}, not a Hello")
        assert self._welcome is not None
        for name, there, here in (
            ("protocol_version", hello.protocol_version, PROTOCOL_VERSION),
            ("page_size", hello.page_size, self._welcome.config.page_size),
            ("tokenizer_digest", hello.tokenizer_digest, self._welcome.tokenizer_digest),
        ):
            if there is not None and there != here:
                return f"{name} is {there!r} at the server and {here!r} at the replica"
        return None
