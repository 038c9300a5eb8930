"""`Connection`: one server at a replica. Its requests end with it."""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any

from ramify.cluster.codecs import (
    decode_params,
    encode_error,
    encode_result,
    pack_floats,
)
from ramify.cluster.step_reports import StepReport, StepReporter, parts_of
from ramify.cluster.wire import (
    MAX_CALLS,
    MAX_UNSENT_BYTES,
    Abort,
    Add,
    Call,
    Draining,
    End,
    FromReplica,
    Hello,
    Load,
    Output,
    Ping,
    Pong,
    RemoteError,
    ReplaceWeights,
    Return,
    Run,
    Step,
    TakeSnapshot,
    WireError,
    decode_from_server,
    encode,
    step_messages,
    unpack_ids,
)
from ramify.engine.async_llm import AsyncLLM
from ramify.engine.request_options import RequestOptions
from ramify.engine.serving.streams import Delivery, LoopDispatcher
from ramify.errors import DrainingError, EngineStoppedError, RamifyError
from ramify.outputs import RequestOutput, StepOutput
from ramify.params import SamplingParams

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 1.0  # of a request that comes while this side drains


class LinkedRequest:
    """A request of a connection; a `Collector`."""

    def __init__(
        self,
        key: int,
        dispatcher: LoopDispatcher,
        deliver: Callable[[LinkedRequest, Delivery], None],
    ) -> None:
        self.key = key
        self._dispatcher, self._deliver = dispatcher, deliver
        self.wake_scheduled = self.is_abandoned = False
        self.engine_request_id: int | None = None
        self.is_ending = False  # aborted; its last output is wanted

    @property
    def dispatcher(self) -> LoopDispatcher:
        """That of the connection's event loop."""
        return self._dispatcher

    @property
    def final_only(self) -> bool:
        """Increments go out as they come: the server needs them if this replica dies."""
        return False

    def receive(self, delivery: Delivery) -> None:
        """See `Receiver`."""
        self._deliver(self, delivery)

    def wake(self) -> None:
        """See `Receiver`; everything was done by `receive`."""
        self.wake_scheduled = False


class Connection:
    """Reads the messages of a server, and sends one `Step` for each step of the engine.

    The engine waits for no connection: what is not sent yet is kept up to `MAX_UNSENT_BYTES`; then
    the connection ends.

    Args:
        write: sends a message, and waits while the peer takes no more.
        peer: its address, for logs.
        replace_weights: answers a `ReplaceWeights`; it may outlive the connection.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        write: Callable[[bytes], Awaitable[None]],
        peer: str,
        replace_weights: Callable[[Connection, ReplaceWeights], None],
    ) -> None:
        self._llm, self._write, self.peer = llm, write, peer
        self._replace_weights = replace_weights
        self.failure: str | None = None  # why this side ended it, if by a fault
        self._takes_requests = True
        self.awaits_weights = False  # it takes no requests until this replica has other weights
        self._requests: dict[int, LinkedRequest] = {}
        self._last_key = -1
        self._num_calls = 0  # that run
        self._snapshot = -1  # number of the last one that was asked for
        self._tasks: set[asyncio.Task[None]] = set()
        self._dispatcher = llm.dispatcher()
        self._reporter = StepReporter(self._dispatcher, self._report)
        self._outbox: deque[bytes] = deque()
        self._num_unsent = 0  # bytes
        self._has_unsent = asyncio.Event()
        self._is_over = asyncio.Event()
        self._is_sent = asyncio.Event()
        self._is_sent.set()
        # The step that is being collected:
        self._is_step_scheduled = False
        self._outputs: list[Output] = []
        self._accepted: list[int] = []
        self._refused: list[tuple[int, RemoteError]] = []
        self._load: Load | None = None
        self._runs: list[Run] = []
        self._num_lost = 0
        self._digest: tuple[int, bytes] | None = None

    async def run(self, messages: AsyncIterator[bytes]) -> None:
        """Serve until the server ends the stream, or `fail`; then abort its requests.

        Raises:
            WireError: a message is broken.
        """
        self._llm.observe(self._reporter)
        reading = asyncio.ensure_future(self._read(messages))
        tasks: tuple[asyncio.Future[Any], ...] = (
            reading,
            asyncio.ensure_future(self._send_all()),
            asyncio.ensure_future(self._is_over.wait()),
        )
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                reading.result()
        finally:
            self._is_over.set()
            for task in (*tasks, *self._tasks):
                task.cancel()
            # Before anything is awaited: this may be cancelled once more.
            for request in self._requests.values():
                request.is_abandoned = True
                self._llm.abort_collector(request)
            self._requests.clear()
            self._llm.unobserve(self._reporter)
            await asyncio.gather(*tasks, *self._tasks, return_exceptions=True)
            with suppress(EngineStoppedError):
                await asyncio.shield(self._llm.run(self._reporter.close))

    def drain(self, *, is_update: bool = False) -> None:
        """Take no more requests: the server sends them elsewhere. The live ones go on.

        Args:
            is_update: this replica goes on with other weights.
        """
        self._takes_requests, self.awaits_weights = False, is_update
        self.send(Draining(RETRY_AFTER_S, is_update))

    async def end(self, limit_s: float) -> None:
        """End the connection once everything was sent, or after a time."""
        await self.flush(limit_s)
        self.close()

    def close(self) -> None:
        """End the connection, whatever is unsent."""
        self._is_over.set()

    def fail(self, reason: str) -> None:
        """End the connection, for this reason."""
        if self.failure is None:
            self.failure = reason
        self._is_over.set()

    async def flush(self, limit_s: float | None = None) -> None:
        """Wait until everything was sent, the connection has ended, or a time is over."""
        self._send_step()
        waits = [asyncio.ensure_future(event.wait()) for event in (self._is_sent, self._is_over)]
        try:
            await asyncio.wait(waits, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    # -- sending -----------------------------------------------------------------------------

    def send(self, message: FromReplica) -> None:
        """Queue a message; never waits.

        Raises:
            WireError: it is too large.
        """
        self._put(encode(message))

    def _put(self, body: bytes) -> None:
        # A single message may be larger than what may wait.
        is_slow = self._num_unsent > MAX_UNSENT_BYTES
        self._outbox.append(body)
        self._num_unsent += len(body)
        self._has_unsent.set()
        self._is_sent.clear()
        if is_slow:
            self.fail(
                f"{self._num_unsent:,} bytes could not be sent, at most {MAX_UNSENT_BYTES:,} are kept: "
                "the server reads too slowly, and its requests end here"
            )

    async def _send_all(self) -> None:
        while True:
            await self._has_unsent.wait()
            while self._outbox:
                body = self._outbox.popleft()
                await self._write(body)
                self._num_unsent -= len(body)
            self._has_unsent.clear()
            self._is_sent.set()

    def _schedule_step(self) -> None:
        """Send a `Step` once all deliveries of this engine step were received."""
        if not self._is_step_scheduled:
            self._is_step_scheduled = True
            asyncio.get_running_loop().call_soon(self._send_step)

    def _send_step(self) -> None:
        self._is_step_scheduled = False
        step = Step(
            self._outputs,
            self._accepted,
            self._refused,
            self._load,
            self._runs,
            self._num_lost,
            self._digest,
        )
        self._outputs, self._accepted, self._refused, self._runs = [], [], [], []
        self._load, self._num_lost, self._digest = None, 0, None
        if step == Step():
            return
        try:
            for body in step_messages(step):
                self._put(body)
        except WireError as error:
            self.fail(str(error))

    def _report(self, report: StepReport) -> None:
        self._load = report.load
        self._runs += report.runs
        self._digest = report.digest or self._digest
        self._num_lost += report.num_lost
        self._schedule_step()

    def _deliver(self, request: LinkedRequest, delivery: Delivery) -> None:
        if request.is_abandoned:
            return
        if isinstance(delivery, int):
            self._accepted.append(request.key)
        elif isinstance(delivery, Exception):
            self._refused.append((request.key, encode_error(delivery)))
            self._requests.pop(request.key, None)
        else:
            self._outputs.append(output_of(request.key, delivery))
            if delivery.output is not None:
                self._requests.pop(request.key, None)
        self._schedule_step()

    # -- reading -----------------------------------------------------------------------------

    async def _read(self, messages: AsyncIterator[bytes]) -> None:
        async for body in messages:
            self._handle(decode_from_server(body))

    def _handle(self, message: Any) -> None:
        match message:
            case Add():
                if message.key <= self._last_key:
                    raise WireError(f"request {message.key} comes after {self._last_key}")
                self._last_key = message.key
                request = LinkedRequest(message.key, self._dispatcher, self._deliver)
                self._requests[message.key] = request
                self._add(request, message)
            case Abort():
                self._abort(message)
            case Call():
                self._num_calls += 1
                if self._num_calls > MAX_CALLS:
                    raise WireError(f"more than {MAX_CALLS} calls run at once")
                self._start(self._call(message))
            case Ping():
                self.send(Pong(message.number))
            case TakeSnapshot():
                self._snapshot = message.number
                self._start(self._send_snapshot(message.number))
            case ReplaceWeights():
                self._replace_weights(self, message)
            case Hello():
                raise WireError("a second Hello on one connection")

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._finish)

    def _finish(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # Else its request would never end.
            logger.error("%s: %s", self.peer, error, exc_info=error)
            self.fail(f"a bug: {type(error).__name__}")

    def _add(self, request: LinkedRequest, message: Add) -> None:
        ids = unpack_ids(message.token_ids)
        generated = [unpack_ids(packed) for packed in message.generated]
        given = message.options
        options = RequestOptions(
            priority=given.priority,
            tenant=given.tenant,
            salt=given.salt,
            max_shared=given.max_shared,
            explain=given.explain,
            retention=tuple(given.retention),
            cache_share=given.cache_share,
            pin_share=given.pin_share,
            session=given.session,
            generated=generated,
        )
        try:
            params = decode_params(message.params)
            if params.structured is None:
                self._submit(request, ids, params, options)
                return
        except RamifyError as error:
            self._deliver(request, error)
            return

        async def compile_and_submit() -> None:
            try:
                await asyncio.to_thread(self._llm.compile_grammar, params, options.tenant)
                if not request.is_abandoned:
                    self._submit(request, ids, params, options)
                if request.is_ending:
                    self._llm.abort_collector(request)
            except RamifyError as error:
                self._deliver(request, error)

        self._start(compile_and_submit())

    def _submit(
        self,
        request: LinkedRequest,
        ids: array[int],
        params: SamplingParams,
        options: RequestOptions,
    ) -> None:
        """Queue a request.

        Raises:
            DrainingError: it comes after `drain`; the engine would compute it with other weights.
        """
        if not self._takes_requests:
            raise DrainingError(RETRY_AFTER_S)
        self._llm.submit(request, ids, params, options)

    def _abort(self, message: Abort) -> None:
        request = self._requests.get(message.key)
        if request is None:  # it has ended meanwhile
            return
        if not message.wants_end:
            request.is_abandoned = True
            del self._requests[message.key]
        request.is_ending = True
        self._llm.abort_collector(request)

    async def _call(self, message: Call) -> None:
        try:
            value = await self._llm.run(message.call)
            self.send(Return(message.key, encode_result(value)))
        except asyncio.CancelledError:
            raise
        except Exception as error:
            if not isinstance(error, RamifyError):
                logger.exception("a call of %s failed", self.peer)
            self.send(Return(message.key, error=encode_error(error)))
        finally:
            self._num_calls -= 1

    async def _send_snapshot(self, number: int) -> None:
        with suppress(EngineStoppedError):
            await self._llm.run(self._reporter.begin_snapshot)
            num_parts = 0
            # One that was asked for later takes its place, and the chunks that are left.
            while number == self._snapshot:
                chunk = await self._llm.run(self._reporter.next_chunk)
                if chunk is None:
                    return
                self._send_step()  # events come before the snapshot that includes them
                for part in parts_of(number, chunk, num_parts):
                    self.send(part)
                    num_parts += 1
                    await self.flush()


def output_of(key: int, event: StepOutput) -> Output:
    """The travelling form of an increment."""
    return Output(
        key,
        list(event.new_token_ids),
        event.text,
        event.index,
        event.finish_reason,
        list(event.logprobs),
        event.cache,
        event.prefix,
        None if event.output is None else end_of(event.output),
    )


def end_of(output: RequestOutput) -> End:
    """The travelling form of an output, without what its increments had."""
    completions = output.completions
    logprobs, embedding = output.prompt_logprobs, output.prompt_embedding
    return End(
        [completion.finish_reason for completion in completions],
        [completion.stop_reason for completion in completions],
        output.metrics,
        output.cache,
        None if logprobs is None else list(logprobs),
        None if embedding is None else pack_floats(embedding),
        None if output.error is None else encode_error(output.error),
    )
