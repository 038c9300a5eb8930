"""`EngineThread`: drives an `EngineCore` in its own thread; commands run between two steps."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Protocol, TypeVar

from ramify.engine.core import EngineCore
from ramify.engine.output_processor import take_stable_text
from ramify.engine.request_options import RequestOptions
from ramify.engine.serving.streams import Collector, Delivery, LoopDispatcher, Receiver
from ramify.errors import (
    ConcurrentCallError,
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
RETRY_AFTER_S = 10.0  # of `DrainingError` and `OverloadedError`
CONCURRENT_CALL_RETRY_S = 0.001  # between tries while another thread is inside the core


class EngineState(str, Enum):
    """Life cycle of the engine thread."""

    READY = "ready"  # takes requests
    DRAINING = "draining"  # finishes its requests, takes no more
    STOPPED = "stopped"  # was closed
    DEAD = "dead"  # ended by a bug
    UNREACHABLE = "unreachable"  # it is elsewhere, and there is no connection to it

    def __str__(self) -> str:
        """The value, as in JSON."""
        return self.value


@dataclass(frozen=True, slots=True)
class Health:
    """State of the engine thread; read without waiting for it."""

    state: EngineState
    is_busy: bool  # a step is being computed
    step_age_s: float | None  # since this step began; between steps, since the last one ended
    error: str | None  # the bug that ended it
    stuck_s: float | None = None  # age of a step that takes longer than `step_timeout_s`

    @property
    def is_alive(self) -> bool:
        """Whether the thread computes requests."""
        return self.state in (EngineState.READY, EngineState.DRAINING)


@dataclass(frozen=True, slots=True)
class Command:
    """A call to make in the engine thread; `fail` is called instead if the thread has ended."""

    do: Callable[[], None]
    fail: Callable[[Exception], None]
    is_void: Callable[[], bool] = bool  # whether nobody waits for the result any more


class EngineObserver(Receiver, Protocol):
    """Reports on the engine between two steps."""

    def report(self, core: EngineCore, step_s: float | None) -> object | None:
        """What `receive` is to get, None: nothing. In the engine thread; must not raise.

        Args:
            step_s: duration of the step that has just ended; None: only commands have run.
        """
        ...


class EngineThread:
    """Drives a core in a thread that starts with the first command. Public methods are thread-safe.

    All calls that touch the core or its cache run in that thread, between two steps, in the order
    in which they were posted.

    Args:
        core: belongs to this thread from now on.
    """

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.ended: Future[None] = Future()  # done when the thread has ended
        self.ended.set_running_or_notify_cancel()  # a waiter that gives up cannot cancel it
        self.error: EngineStoppedError | None = None
        self.has_aborted = False  # requests were live when the thread ended
        self._state = EngineState.READY
        self._commands: deque[Command] = deque()
        self._taken: deque[Command] = deque()  # those of `_commands` that the thread is running
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._step_s: float | None = None
        self._is_stepping = False
        # The following attributes are for the engine thread only.
        self._collectors: dict[int, Collector] = {}
        self._dirty: dict[LoopDispatcher, None] = {}  # to flush; a dict for its order
        self._when_idle: deque[Command] = deque()
        self._deferred: list[Command] = []  # requests that came after a command in `_when_idle`
        self._is_idle = True
        self._observers: list[EngineObserver] = []

    # -- for any thread ----------------------------------------------------------------------

    def call(self, call: Callable[[EngineCore], T]) -> Future[T]:
        """Run `call(core)` between two steps; the future gets its result or its error.

        Raises:
            EngineStoppedError: the engine has ended.
        """
        command, future = self._command(call)
        self._post(command)
        return future

    def call_when_idle(self, call: Callable[[EngineCore], T]) -> Future[T]:
        """Run `call(core)` once the live requests have ended; later requests wait for it.

        Cancelling the future before that releases them.
        """
        command, future = self._command(call)
        self._post(Command(lambda: self._when_idle.append(command), command.fail))

        def drop() -> None:
            if command in self._when_idle:
                self._when_idle.remove(command)
                if not self._when_idle:
                    self._take_deferred()

        future.add_done_callback(
            lambda done: self._post_if_running(drop) if done.cancelled() else None
        )
        return future

    def submit(
        self,
        collector: Collector,
        ids: Sequence[int],
        params: SamplingParams,
        options: RequestOptions,
        *,
        prompt: str | None,
    ) -> None:
        """Queue a request; its id and outputs, or the error that refuses it, go to `collector`.

        It arrives now, though a step that runs takes its time first.

        Raises:
            EngineStoppedError, DrainingError: the engine has ended, or takes no more requests.
        """
        if self._state is EngineState.DRAINING:
            raise DrainingError(RETRY_AFTER_S)

        add_request = partial(
            self.core.add_request, ids, params, options, prompt=prompt, arrival_s=self.core.now_s()
        )

        def add() -> None:
            if self._when_idle:
                self._defer(command, collector)
            else:
                self._add(collector, add_request)

        command = Command(
            add, lambda error: self._deliver(collector, error), lambda: collector.is_abandoned
        )
        self._post(command)

    def observe(self, observer: EngineObserver) -> None:
        """Ask an observer for a report between any two steps from now on.

        Raises:
            EngineStoppedError: the engine has ended.
        """
        self._post(Command(lambda: self._observers.append(observer), lambda error: None))

    def unobserve(self, observer: EngineObserver) -> None:
        """End `observe`."""

        def do() -> None:
            if observer in self._observers:
                self._observers.remove(observer)

        self._post_if_running(do)

    def abort(self, collector: Collector) -> None:
        """Abort the request of a collector, if it has not ended."""

        def do() -> None:
            if collector.engine_request_id in self._collectors:
                self._abort(collector.engine_request_id)

        self._post_if_running(do)

    def drain(self) -> None:
        """Take no more requests; the thread ends when the live ones have finished."""
        with self._changed:
            if self._state is EngineState.READY:
                self._state = EngineState.DRAINING
            self._end_unless_running()

    def stop(self) -> None:
        """End the thread after this step; abort the live requests and notify their readers."""
        with self._changed:
            if self._state is not EngineState.DEAD:
                self._state = EngineState.STOPPED
            self._end_unless_running()

    def end_with(self, error: EngineStoppedError) -> None:
        """End the thread after this step, since its executor has ended; readers get this error."""

        def end() -> None:
            raise error

        with suppress(EngineStoppedError):  # it has ended already
            self._post(Command(end, lambda stopped: None))

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until the thread has ended; returns at once if called in that thread."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def health(self) -> Health:
        """See `Health`; does not wait for the thread."""
        age_s = None if self._step_s is None else time.monotonic() - self._step_s
        error = None if self.error is None else str(self.error)
        stuck_s = self.core.watchdog.stuck_s or None
        return Health(self._state, self._is_stepping, age_s, error, stuck_s)

    def _command(self, call: Callable[[EngineCore], T]) -> tuple[Command, Future[T]]:
        future: Future[T] = Future()

        def do() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = call(self.core)
            except StopIteration as error:  # a future cannot hold StopIteration
                wrapped = RuntimeError("the call raised StopIteration")
                wrapped.__cause__ = error
                future.set_exception(wrapped)
            except BaseException as error:  # noqa: BLE001 - goes to the caller through the future
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
        """Run `do` in the thread, if it has not ended; nobody waits for the result."""
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
        except EngineStoppedError as error:  # its executor has ended
            logger.error("%s", error)
            self.error = error
            with self._changed:
                self._state = EngineState.DEAD
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
        """Run the posted commands, then one step; returns False if the thread is to end."""
        with self._changed:
            while not self._commands and self._is_idle and self._state is EngineState.READY:
                self._changed.wait()
            self._taken, self._commands = self._commands, deque()
        while self._taken:
            self._taken.popleft().do()
        if self._state is EngineState.STOPPED:
            return False
        self._run_idle_calls()
        self._report(None)
        self._flush()  # accepted and refused requests need not wait for the step to know
        if self.core.has_unfinished:
            self._is_idle = False
            self._step()
        elif self._state is EngineState.DRAINING:
            with self._changed:
                if not self._commands:
                    self._state = EngineState.STOPPED
            return self._state is EngineState.DRAINING
        else:
            self._is_idle = not (self.core.verify_next_hit() or self.core.tend_tiers())
        self._flush()
        return True

    def _run_idle_calls(self) -> None:
        while self._when_idle and not self.core.has_unfinished:
            self._when_idle.popleft().do()
            if not self._when_idle:
                self._take_deferred()
                while self._taken:
                    self._taken.popleft().do()

    def _take_deferred(self) -> None:
        """Put the deferred requests before the other taken commands."""
        self._taken.extendleft(reversed(self._deferred))
        self._deferred = []

    def _defer(self, command: Command, collector: Collector) -> None:
        """Keep a request for after `_when_idle`; it counts towards `max_waiting` like a queued one."""
        scheduler, limit = self.core.scheduler, self.core.max_waiting
        if limit is not None and len(self._deferred) + len(scheduler.waiting) >= limit:
            self._deferred = [waiting for waiting in self._deferred if not waiting.is_void()]
        count = len(self._deferred) + len(scheduler.waiting)
        if limit is not None and count >= limit:
            self._deliver(collector, OverloadedError(count, limit, RETRY_AFTER_S))
        else:
            self._deferred.append(command)

    def _add(self, collector: Collector, add_request: Callable[[], int]) -> None:
        if collector.is_abandoned:
            return
        try:
            request_id = add_request()
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
        except ConcurrentCallError as error:
            logger.error("%s", error)
            with self._changed:
                self._changed.wait(CONCURRENT_CALL_RETRY_S)
            return
        finally:
            begin_s, self._step_s, self._is_stepping = self._step_s, time.monotonic(), False
        for event in events:
            collector = self._collectors.get(event.request_id)
            if collector is not None:
                if event.output is not None:
                    del self._collectors[event.request_id]
                elif collector.final_only:
                    continue
                self._deliver(collector, event)
        self._report(self._step_s - begin_s)

    def _report(self, step_s: float | None) -> None:
        for observer in self._observers:
            report = observer.report(self.core, step_s)
            if report is not None:
                observer.dispatcher.put(observer, report)
                self._dirty[observer.dispatcher] = None

    def _abort(self, request_id: int) -> None:
        """Abort a live request, and send its reader the final outputs."""
        completions = self.core.group_of(request_id)
        try:
            output = self.core.abort(request_id)
        except UnknownRequestError:  # a rebuild has ended it; the next step returns its output
            return
        # Text that was held back because a stop string might have begun in it.
        texts = [take_stable_text(completion) for completion in completions]
        collector = self._collectors.pop(request_id)
        if collector.is_abandoned:
            return
        reasons = [completion.finish_reason for completion in output.completions]
        aborted = [index for index, reason in enumerate(reasons) if reason is FinishReason.ABORT]
        *others, last = aborted or [0]
        for index in others if not collector.final_only else ():
            end = StepOutput(request_id, (), None, index, texts[index], (), reasons[index])
            self._deliver(collector, end)
        end = StepOutput(request_id, (), output, last, texts[last], (), reasons[last])
        self._deliver(collector, end)

    def abort_id(self, core: EngineCore, request_id: int) -> None:
        """Abort a request by its id; a function for `call`.

        Raises:
            UnknownRequestError: no live request has this id.
        """
        if request_id not in self._collectors or core is not self.core:
            raise UnknownRequestError(request_id)
        self._abort(request_id)

    def _deliver(self, collector: Collector, delivery: Delivery) -> None:
        collector.dispatcher.put(collector, delivery)
        self._dirty[collector.dispatcher] = None

    def _flush(self) -> None:
        dirty, self._dirty = self._dirty, {}
        for dispatcher in dirty:
            if not dispatcher.flush():  # its event loop is closed
                self._observers = [
                    observer
                    for observer in self._observers
                    if observer.dispatcher is not dispatcher
                ]
                for request_id, collector in list(self._collectors.items()):
                    if collector.dispatcher is dispatcher:
                        collector.is_abandoned = True
                        self._abort(request_id)

    def _close_core(self) -> None:
        """Close the tiers of the core; those who wait for the end are told in any case."""
        try:
            if self.error is None:
                self.core.close()
            else:
                self.core.abandon()
        except Exception:
            logger.exception("the cache tiers were not closed in order")

    def _shut_down(self) -> None:
        """Abort live requests, fail the commands that are left, and notify all who wait."""
        has_readers = any(not collector.is_abandoned for collector in self._collectors.values())
        self.has_aborted = has_readers or bool(self._deferred)
        for request_id in list(self._collectors) if self.error is None else ():
            self._abort(request_id)
        for collector in self._collectors.values():
            self._deliver(collector, self._stopped_error())
        self._collectors.clear()
        self._flush()  # before the tiers, which may take seconds
        self._close_core()
        with self._changed:
            left = [*self._deferred, *self._when_idle, *self._taken, *self._commands]
            self._commands.clear()
            self.ended.set_result(None)
        for command in left:
            command.fail(self._stopped_error())
        self._flush()
