"""The engine's own thread: commands go in between two steps, what the steps did goes out."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from ramify.engine.core import EngineCore
from ramify.engine.output_processor import take_stable_text
from ramify.engine.serving.streams import Delivery, LoopDispatcher, OutputCollector
from ramify.errors import (
    DrainingError,
    EngineStoppedError,
    OverloadedError,
    RamifyError,
    UnknownRequestError,
)
from ramify.outputs import FinishReason, StepOutput
from ramify.params import SamplingParams

logger = logging.getLogger(__name__)
T = TypeVar("T")


class EngineState(str, Enum):
    """What the engine's thread is there for."""

    READY = "ready"  # takes requests
    DRAINING = "draining"  # finishes those it has
    STOPPED = "stopped"  # was closed
    DEAD = "dead"  # ended by a bug

    def __str__(self) -> str:
        """The plain word."""
        return self.value


@dataclass(frozen=True, slots=True)
class Health:
    """Whether the engine can be relied on; read without waiting for it."""

    state: EngineState
    is_busy: bool  # a step is being computed
    step_age_s: float | None  # since the last step began, or ended if none is being computed
    error: str | None  # what ended a dead one
    stuck_s: float | None = None  # how long a step has gone on beyond `step_timeout_s`

    @property
    def is_alive(self) -> bool:
        """Whether requests are computed."""
        return self.state in (EngineState.READY, EngineState.DRAINING)


@dataclass(frozen=True, slots=True)
class Command:
    """Something to do in the engine's thread; `fail` is called instead when it has ended."""

    do: Callable[[], None]
    fail: Callable[[Exception], None]
    is_void: Callable[[], bool] = bool  # whether nobody waits for it any more


class EngineThread:
    """Drives a core in a thread that starts with the first command. Its methods are thread-safe.

    Everything that touches the core or its cache runs in that thread, between two steps, in the
    order in which it was asked for.

    Args:
        core: nobody else touches it from now on.
        retry_after_s: what `DrainingError` tells.
    """

    def __init__(self, core: EngineCore, *, retry_after_s: float = 10.0) -> None:
        self.core, self.retry_after_s = core, retry_after_s
        self.ended: Future[None] = Future()  # done when the thread is over
        self.ended.set_running_or_notify_cancel()  # whoever gives up waiting does not cancel it
        self.error: EngineStoppedError | None = None
        self.has_aborted = False  # requests were there when the thread ended
        self._state = EngineState.READY
        self._commands: deque[Command] = deque()
        self._taken: deque[Command] = deque()  # out of `_commands`, by the thread
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._step_s: float | None = None
        self._is_stepping = False
        # what follows belongs to the thread
        self._collectors: dict[int, OutputCollector] = {}
        self._dirty: dict[LoopDispatcher, None] = {}  # outlets that something was put into
        self._when_idle: deque[Command] = deque()
        self._deferred: list[Command] = []  # requests that came after what waits for an idle moment
        self._is_idle = True

    # -- for any thread ----------------------------------------------------------------------

    def call(self, call: Callable[[EngineCore], T]) -> Future[T]:
        """Run `call(core)` between two steps; its errors are its caller's alone.

        Raises:
            EngineStoppedError: the engine has ended.
        """
        command, future = self._command(call)
        self._post(command)
        return future

    def call_when_idle(self, call: Callable[[EngineCore], T]) -> Future[T]:
        """Run `call(core)` when all requests of now have ended; later ones wait for it.

        If it is cancelled before, they do not wait for it any longer.
        """
        command, future = self._command(call)
        self._post(Command(lambda: self._when_idle.append(command), command.fail))

        def drop() -> None:
            if command in self._when_idle:
                self._when_idle.remove(command)
                if not self._when_idle:
                    held, self._deferred = self._deferred, []
                    self._taken.extendleft(reversed(held))

        future.add_done_callback(
            lambda done: self._post_if_running(drop) if done.cancelled() else None
        )
        return future

    def submit(
        self, collector: OutputCollector, ids: Sequence[int], params: SamplingParams, **options: Any
    ) -> None:
        """Queue a request, whose events go to `collector`, as does the error if it is refused.

        Raises:
            EngineStoppedError, DrainingError: the engine has ended, or is about to.
        """
        if self._state is EngineState.DRAINING:
            raise DrainingError(self.retry_after_s)

        def add() -> None:
            if self._when_idle:
                self._defer(command, collector)
            else:
                self._add(collector, ids, params, options)

        command = Command(
            add, lambda error: self._deliver(collector, error), lambda: collector.is_abandoned
        )
        self._post(command)

    def abort(self, collector: OutputCollector) -> None:
        """End the request of an inbox, if it has not ended; nobody is told."""

        def do() -> None:
            if collector.engine_request_id in self._collectors:
                self._abort(collector.engine_request_id)

        self._post_if_running(do)

    def drain(self) -> None:
        """Take no requests from now on; the thread ends when those it has are done."""
        with self._changed:
            if self._state is EngineState.READY:
                self._state = EngineState.DRAINING
            self._end_unless_running()

    def stop(self) -> None:
        """End the thread after this step; what is left is aborted and told."""
        with self._changed:
            if self._state is not EngineState.DEAD:
                self._state = EngineState.STOPPED
            self._end_unless_running()

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until the thread is over; from that thread itself, do not."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def health(self) -> Health:
        """See `Health`; waits for nobody."""
        age_s = None if self._step_s is None else time.monotonic() - self._step_s
        told = None if self.error is None else str(self.error)
        watchdog = self.core.watchdog
        stuck_s = watchdog.stuck_s if watchdog.is_stuck else None
        return Health(self._state, self._is_stepping, age_s, told, stuck_s)

    def _command(self, call: Callable[[EngineCore], T]) -> tuple[Command, Future[T]]:
        future: Future[T] = Future()

        def do() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = call(self.core)
            except StopIteration as error:  # which no future can hold
                wrapped = RuntimeError("the call raised StopIteration")
                wrapped.__cause__ = error
                future.set_exception(wrapped)
            except BaseException as error:  # noqa: BLE001 - the caller's, and told to it
                future.set_exception(error)
            else:
                future.set_result(result)

        def fail(error: Exception) -> None:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)

        return Command(do, fail), future

    def _post(self, command: Command) -> None:
        with self._changed:
            if self._state not in (EngineState.READY, EngineState.DRAINING):
                raise self._stopped_error()
            self._commands.append(command)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ramify", daemon=True)
                self._thread.start()
            self._changed.notify()

    def _post_if_running(self, do: Callable[[], None]) -> None:
        """Have something done of which nobody hears; if the engine has ended, there is no need."""
        with self._changed:
            if self._thread is not None and not self.ended.done():
                self._commands.append(Command(do, lambda error: None))
                self._changed.notify()

    def _stopped_error(self) -> EngineStoppedError:
        if self.error is not None:
            return self.error
        return EngineStoppedError("the engine was closed; make another one")

    def _end_unless_running(self) -> None:
        if self._thread is None:
            self._state = EngineState.STOPPED
            if not self.ended.done():
                self.ended.set_result(None)
        self._changed.notify()

    # -- in the thread -----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._run_once():
                pass
        except BaseException as error:
            logger.exception("the engine has ended by a bug")
            self.error = EngineStoppedError(
                f"the engine has ended by a bug: {type(error).__name__}: {error}; make another one"
            )
            self.error.__cause__ = error
            with self._changed:
                self._state = EngineState.DEAD
        self._shut_down()

    def _run_once(self) -> bool:
        """Commands, then a step; False when the thread is to end."""
        with self._changed:
            while not self._commands and self._is_idle and self._state is EngineState.READY:
                self._changed.wait()
            self._taken, self._commands = self._commands, deque()
        while self._taken:
            self._taken.popleft().do()
        if self._state is EngineState.STOPPED:
            return False
        self._run_idle_calls()
        self._flush()  # who was queued or refused need not wait for a step to know
        if self.core.has_unfinished:
            self._is_idle = False
            self._step()
        elif self._state is EngineState.DRAINING:
            with self._changed:
                if not self._commands:
                    self._state = EngineState.STOPPED
            return self._state is EngineState.DRAINING
        else:
            self._is_idle = not self.core.verify_next_hit()
        self._flush()
        return True

    def _run_idle_calls(self) -> None:
        while self._when_idle and not self.core.has_unfinished:
            self._when_idle.popleft().do()
            if not self._when_idle:
                held, self._deferred = self._deferred, []
                self._taken.extend(held)
                while self._taken:
                    self._taken.popleft().do()

    def _defer(self, command: Command, collector: OutputCollector) -> None:
        """Keep a request back, if it has a place; those that are kept back wait like others."""
        scheduler, limit = self.core.scheduler, self.core.max_waiting
        if limit is not None and len(self._deferred) + len(scheduler.waiting) >= limit:
            self._deferred = [one for one in self._deferred if not one.is_void()]
        count = len(self._deferred) + len(scheduler.waiting)
        if limit is not None and count >= limit:
            self._deliver(collector, OverloadedError(count, limit, self.retry_after_s))
        else:
            self._deferred.append(command)

    def _add(
        self,
        collector: OutputCollector,
        ids: Sequence[int],
        params: SamplingParams,
        options: dict[str, Any],
    ) -> None:
        if collector.is_abandoned:
            return
        try:
            request_id = self.core.add_request(ids, params, **options)
        except Exception as error:
            if not isinstance(error, RamifyError):
                logger.exception("a request could not be queued")
            self._deliver(collector, error)
            return
        collector.engine_request_id = request_id
        self._collectors[request_id] = collector
        self._deliver(collector, request_id)

    def _step(self) -> None:
        self._step_s, self._is_stepping = time.monotonic(), True
        try:
            events = self.core.step_or_fail_blocked()
        finally:
            self._step_s, self._is_stepping = time.monotonic(), False
        for event in events:
            inbox = self._collectors.get(event.request_id)
            if inbox is not None:
                if event.output is not None:
                    del self._collectors[event.request_id]
                elif inbox.final_only:
                    continue
                self._deliver(inbox, event)

    def _abort(self, request_id: int) -> None:
        """End a live request; whoever reads its inbox is told."""
        answers = self.core.group_of(request_id)
        try:
            output = self.core.abort(request_id)
        except UnknownRequestError:  # a repair has ended it: the next step tells
            return
        texts = [take_stable_text(one) for one in answers]  # what might have begun a stop text
        inbox = self._collectors.pop(request_id)
        if inbox.is_abandoned:
            return
        reasons = [one.finish_reason for one in output.completions]
        told = [index for index, reason in enumerate(reasons) if reason is FinishReason.ABORT]
        *others, last = told or [0]
        for index in others if not inbox.final_only else ():
            end = StepOutput(request_id, (), None, index, texts[index], (), reasons[index])
            self._deliver(inbox, end)
        end = StepOutput(request_id, (), output, last, texts[last], (), reasons[last])
        self._deliver(inbox, end)

    def abort_id(self, core: EngineCore, request_id: int) -> None:
        """End a request by its id; for `call`.

        Raises:
            UnknownRequestError: no live request has this id.
        """
        if request_id not in self._collectors or core is not self.core:
            raise UnknownRequestError(request_id)
        self._abort(request_id)

    def _deliver(self, collector: OutputCollector, delivery: Delivery) -> None:
        collector.dispatcher.put(collector, delivery)
        self._dirty[collector.dispatcher] = None

    def _flush(self) -> None:
        dirty, self._dirty = self._dirty, {}
        for outlet in dirty:
            if not outlet.flush():
                for request_id, inbox in list(self._collectors.items()):
                    if inbox.dispatcher is outlet:
                        inbox.is_abandoned = True
                        self._abort(request_id)

    def _shut_down(self) -> None:
        """Nothing stays behind: live requests, and commands that nobody will carry out."""
        waiting = any(not one.is_abandoned for one in self._collectors.values())
        self.has_aborted = waiting or bool(self._deferred)
        for request_id in list(self._collectors) if self.error is None else ():
            self._abort(request_id)
        for inbox in self._collectors.values():
            self._deliver(inbox, self._stopped_error())
        self._collectors.clear()
        with self._changed:
            left = [*self._deferred, *self._when_idle, *self._taken, *self._commands]
            self._commands.clear()
            self.ended.set_result(None)
        for command in left:
            command.fail(self._stopped_error())
        self._flush()
