"""`TimeoutProtocol`: clients that send headers or read too slowly, on real sockets."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from ramify.server.http.uvicorn_server import TimeoutProtocol


class Impatient(TimeoutProtocol):
    header_s, stall_s = 0.2, 0.2


class App:
    """An ASGI application: an endless stream on /endless, else a short body after 0.5 s."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()
        self.num_sent = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if scope["path"] != "/endless":
            await asyncio.sleep(0.5)  # longer than both limits, which must not apply to the server
            await send({"type": "http.response.body", "body": b"done"})
            return
        watcher = asyncio.ensure_future(self.watch(receive))
        while not self.gone.is_set():
            await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
            self.num_sent += 1
        await watcher

    async def watch(self, receive: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.gone.set()


@asynccontextmanager
async def served(app: App) -> AsyncIterator[int]:
    config = uvicorn.Config(app, http=Impatient, lifespan="off", log_config=None)
    config.load()
    state = ServerState()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: Impatient(config=config, server_state=state, app_state={}), "127.0.0.1", 0
    )
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


def test_a_client_that_does_not_read_is_dropped() -> None:
    """The application gets `http.disconnect`, and its pending send returns."""

    async def main() -> None:
        app = App()
        async with served(app) as port:
            with socket.create_connection(("127.0.0.1", port)) as client:
                client.sendall(b"GET /endless HTTP/1.1\r\nhost: x\r\n\r\n")
                await asyncio.wait_for(app.gone.wait(), 30)
                assert app.num_sent > 0

    asyncio.run(main())


def test_a_client_that_reads_slowly_but_reads_is_served() -> None:
    """A read of any size within `stall_s` restarts the timer."""

    async def main() -> None:
        app = App()
        async with served(app) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=4096)
            writer.write(b"GET /endless HTTP/1.1\r\nhost: x\r\n\r\n")
            for _ in range(40):
                assert await reader.read(1 << 20)
                await asyncio.sleep(0.02)
            assert not app.gone.is_set()
            writer.close()
            await asyncio.wait_for(app.gone.wait(), 30)

    asyncio.run(main())


def test_headers_that_do_not_come_end_the_connection() -> None:
    """No headers, half of them, or half of a second request's; a slow response does not end it."""

    async def main() -> None:
        async with served(App()) as port:
            request = b"GET /short HTTP/1.1\r\nhost: x\r\n\r\n"
            for first, partial in ((b"", b""), (b"", request[:9]), (request, request[:9])):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(first)
                if first:
                    response = await asyncio.wait_for(reader.readuntil(b"done"), 30)
                    assert b"200 OK" in response
                writer.write(partial)
                remainder = reader.read()
                with suppress(ConnectionResetError):
                    assert b"200 OK" not in await asyncio.wait_for(remainder, 30)
                writer.close()

    asyncio.run(main())
