"""Sessions: prompts that grow turn by turn, branch and go back; each token is computed once."""

# ruff: noqa: SLF001 - `SessionStream` is the part of `AsyncSession` that lives as long as an answer,
# and the private calls of `LLM` and `AsyncLLM` are for sessions

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar

from ramify.cache.call_guard import CallGuard
from ramify.cache.pins import Pin
from ramify.counts import counted
from ramify.engine.cache_admin.async_view import AsyncCacheView
from ramify.engine.cache_admin.view import CacheView
from ramify.engine.call_turns import CallTurns, whole_call
from ramify.engine.request_options import RequestOptions
from ramify.engine.serving.streams import Stream
from ramify.engine.sessions.transcript import Savepoint, Transcript
from ramify.engine.text.prompt_inputs import Message, Prompt, check_template_options
from ramify.errors import EngineStoppedError, InvalidParamsError, PinError, RamifyError
from ramify.outputs import FinishReason, RequestOutput, StepOutput
from ramify.params import SamplingParams

if TYPE_CHECKING:
    from ramify.engine.text.tokenizer import Tokenizer

Engine = TypeVar("Engine")


class AnswersPrompts(Protocol):
    """The calls that a `Session` makes; `LLM` has them."""

    turns: CallTurns

    @property
    def cache(self) -> CacheView:
        """Has `pin`, `unpin` and `end_session`."""

    def _answer(
        self, prompt: Prompt, params: SamplingParams, options: RequestOptions
    ) -> RequestOutput:
        """Answer one prompt, as `LLM.generate` does."""


class StreamsAnswers(Protocol):
    """The calls that an `AsyncSession` makes; `AsyncLLM` has them."""

    @property
    def cache(self) -> AsyncCacheView:
        """Has `pin`, `unpin` and `end_session`."""

    def _stream_prompt(
        self, prompt: Prompt, params: SamplingParams, options: RequestOptions
    ) -> Stream:
        """Stream the answer to one prompt, as `AsyncLLM.stream` does."""


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """Options of every turn of a session and of its forks.

    Raises:
        InvalidParamsError: `ttl_s` is not None and not a number of seconds > 0.
    """

    request: RequestOptions
    pin: bool = False
    ttl_s: float | None = None

    def __post_init__(self) -> None:
        ttl_s: Any = self.ttl_s
        is_number = isinstance(ttl_s, int | float) and not isinstance(ttl_s, bool)
        if ttl_s is not None and not (is_number and ttl_s > 0):
            raise InvalidParamsError("ttl_s", ttl_s, "None or more than 0 seconds")


class _Family:
    """A session and its forks, which the cache knows by one name, and those that are not closed."""

    def __init__(self) -> None:
        self.name = f"session:{secrets.token_hex(8)}"
        self.numbers = count()
        self.open = set[int]()  # numbers of those that are not closed


class _BaseSession(Generic[Engine]):
    """The state of `Session` and `AsyncSession`: a transcript, and the pin of the last turn."""

    turns: CallTurns

    def __init__(
        self,
        llm: Engine,
        transcript: Transcript,
        options: SessionOptions,
        family: _Family | None = None,
    ) -> None:
        self._llm, self._transcript = llm, transcript
        self._family = _Family() if family is None else family
        self._number = next(self._family.numbers)
        self._family.open.add(self._number)
        request = replace(options.request, session=self._family.name)
        self._options = replace(options, request=request)
        self._pinned: Pin | None = None
        self._pin_refused: str | None = None
        self._is_busy = False  # an answer of an `AsyncSession` is running
        # Calls of `aclose`: an answer that was begun before the last of them is not pinned.
        self._num_closed = 0

    def __repr__(self) -> str:
        count = len(self._transcript.messages)
        size = f"{counted(count, 'message')}, " if count else ""
        pinned = ", pinned" if self._pinned is not None else ""
        return f"<{type(self).__name__}: {size}{counted(len(self._transcript.token_ids), 'token')}{pinned}>"

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All token ids so far; in a conversation, up to the last answer."""
        return tuple(self._transcript.token_ids)

    @property
    def messages(self) -> list[Message]:
        """The messages of a conversation, answers included."""
        return self._transcript.messages

    @property
    def pin_refused(self) -> str | None:
        """The reason why the last turn is not pinned; None if it is, or `pin` is off."""
        return self._pin_refused

    @whole_call
    def append(self, more: Prompt | Message | Sequence[Message]) -> None:
        """Add to the prompt of the next turn.

        Args:
            more: a text or token ids; in a conversation a message, several messages, or the text
                of a user's message.

        Raises:
            InvalidParamsError: an answer is running, or `more` is malformed.
        """
        self._require_idle("append")
        self._transcript.append(more)

    @whole_call
    def mark(self) -> Savepoint:
        """The present length of the session, for `rollback`."""
        return self._transcript.mark()

    @whole_call
    def rollback(self, to: Savepoint | int) -> None:
        """Go back to a `mark`, or drop the last `to` tokens (in a conversation, messages).

        Raises:
            InvalidParamsError: the session is shorter than that, or an answer is running.
        """
        self._require_idle("rollback")
        self._transcript.rollback(to)

    @whole_call
    def fork(self, count: int = 2) -> list[Self]:
        """`count` new sessions that continue from here independently; this one is unchanged."""
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise InvalidParamsError("count", count, "an integer >= 1")
        return [
            type(self)(self._llm, self._transcript.copy(), self._options, self._family)
            for _ in range(count)
        ]

    def _begin_turn(self, params: SamplingParams | None) -> tuple[Sequence[int], SamplingParams]:
        """Prompt ids and parameters of the next turn.

        Raises:
            RequestError: there is no prompt, `params` ask for several answers, or one is running.
        """
        chosen: Any = SamplingParams() if params is None else params
        if not isinstance(chosen, SamplingParams):
            raise InvalidParamsError("params", params, "SamplingParams or None")
        if chosen.n != 1:
            raise InvalidParamsError("n", chosen.n, "1: a session has one answer; fork it for more")
        self._require_idle("generate")
        self._family.open.add(self._number)
        return self._transcript.prompt_ids(), chosen

    def _leave_family(self) -> bool:
        """Whether this session is closed now, and all its forks are."""
        self._family.open.discard(self._number)
        return not self._family.open

    def _require_idle(self, call: str) -> None:
        """Raise InvalidParamsError while an answer is running: it continues the present transcript."""
        if self._is_busy:
            allowed = "left until the running answer has ended: await it, or fork"
            raise InvalidParamsError(call, "called", allowed)

    def _end_turn(self, output: RequestOutput) -> bool:
        """Add an answer to the transcript unless it failed or was aborted; returns whether to pin it."""
        if output.error is not None or output.finish_reason is FinishReason.ABORT:
            return False
        self._transcript.add_answer(output)
        return self._options.pin


class Session(_BaseSession[AnswersPrompts]):
    """A growing prompt over an `LLM`; made by `LLM.session`.

    A plain session is a sequence of token ids: appended text is tokenised by itself, generated ids
    are kept. A conversation is a list of messages for the chat template; `Transcript` says which
    parts of it are tokenised again, and when.

    The K/V of earlier turns is read from the cache unless it was evicted. A turn computes the new
    tokens, and those before them that do not fill a page. Forks share K/V in the same way; nothing
    is copied. With `pin`, the newest turn is not evicted, as far as the budget for pins allows.
    """

    def __init__(
        self,
        llm: AnswersPrompts,
        transcript: Transcript,
        options: SessionOptions,
        family: _Family | None = None,
    ) -> None:
        super().__init__(llm, transcript, options, family)
        self.turns = llm.turns

    @whole_call
    def generate(self, params: SamplingParams | None = None) -> RequestOutput:
        """Answer, and add the answer to the session, unless it failed (`output.error`).

        Raises:
            RequestError: the turn can never be served; the session is unchanged.
        """
        ids, chosen = self._begin_turn(params)
        output = self._llm._answer(ids, chosen, self._options.request)
        if output.error is not None and output.was_refused:
            raise output.error
        before = self._transcript.mark()
        if self._end_turn(output):
            try:
                self._pin()
            except BaseException:  # Ctrl-C: the caller gets no answer, so the session has none
                self._transcript.rollback(before)
                raise
        return output

    @whole_call
    def close(self) -> None:
        """Unpin the last turn, and let the session's pages go.

        Once all its forks are closed too, pages that no other request has used are evicted first.
        """
        pin, self._pinned = self._pinned, None
        self._unpin(pin)
        if self._leave_family():
            request = self._options.request
            with suppress(EngineStoppedError):
                self._llm.cache.end_session(request.session, tenant=request.tenant)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _pin(self) -> None:
        options = self._options
        self._pin_refused, before = None, self._pinned
        try:
            self._pinned = self._llm.cache.pin(
                self._transcript.token_ids,
                owner="session",
                ttl_s=options.ttl_s,
                tenant=options.request.tenant,
                salt=options.request.salt,
            )
        except PinError as error:
            self._pin_refused = str(error)
            return
        self._unpin(before)

    def _unpin(self, pin: Pin | None) -> None:
        if pin is not None:
            with suppress(PinError):  # it has expired
                self._llm.cache.unpin(pin)


class AsyncSession(_BaseSession[StreamsAnswers]):
    """A `Session` over an `AsyncLLM`: answers are awaited or streamed."""

    def __init__(
        self,
        llm: StreamsAnswers,
        transcript: Transcript,
        options: SessionOptions,
        family: _Family | None = None,
    ) -> None:
        super().__init__(llm, transcript, options, family)
        self.turns = CallTurns(CallGuard())

    async def generate(self, params: SamplingParams | None = None) -> RequestOutput:
        """See `Session.generate`; an answer that is aborted or cancelled is not added either."""
        output: RequestOutput | None = None
        async for event in self.stream(params):
            output = event.output
        assert output is not None
        return output

    def stream(self, params: SamplingParams | None = None) -> SessionStream:
        """The increments of an answer; it is added to the session once the last one is read."""
        return SessionStream(self, params)

    async def aclose(self) -> None:
        """See `Session.close`; a running answer will not be pinned."""
        self._num_closed += 1
        pin, self._pinned = self._pinned, None
        await self._unpin(pin)
        if self._leave_family():
            request = self._options.request
            with suppress(RamifyError):  # the engine has ended, or no replica answers
                await self._llm.cache.end_session(request.session, tenant=request.tenant)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _pin(self, num_closed: int) -> None:
        options = self._options
        self._pin_refused, before = None, self._pinned
        try:
            pin = await self._llm.cache.pin(
                self._transcript.token_ids,
                owner="session",
                ttl_s=options.ttl_s,
                tenant=options.request.tenant,
                salt=options.request.salt,
            )
        except (PinError, EngineStoppedError) as error:  # the answer itself is not lost
            self._pin_refused = str(error)
            return
        if num_closed != self._num_closed:
            before = pin
        else:
            self._pinned = pin
        await self._unpin(before)

    async def _unpin(self, pin: Pin | None) -> None:
        async def end(pin: Pin) -> None:
            with suppress(PinError, EngineStoppedError):  # expired, or the engine has ended
                await self._llm.cache.unpin(pin)

        if pin is not None:
            # Nobody else knows this pin, so a cancelled caller must still end it.
            await asyncio.shield(end(pin))


class SessionStream:
    """The increments of a session's answer: `async for event in session.stream()`.

    As with `Stream`, leaving it (`break`, `aclose`, a cancelled task, the last reference dropped)
    aborts the request, and the session is unchanged. The request is queued at the first `await`.
    """

    def __init__(self, session: AsyncSession, params: SamplingParams | None) -> None:
        self._session, self._params = session, params
        self._stream: Stream | None = None
        self._num_closed, self._is_over = 0, False

    def __aiter__(self) -> SessionStream:
        return self

    async def __anext__(self) -> StepOutput:
        if self._is_over:
            raise StopAsyncIteration
        try:
            if self._stream is None:
                self._stream = self._begin()
            event = await anext(self._stream)
            if event.output is not None:
                await self._end(event.output)
        except BaseException:
            self._leave()
            raise
        return event

    async def aclose(self) -> None:
        """See `Stream.aclose`."""
        self._leave()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._leave()

    def __del__(self) -> None:
        self._leave()

    def _begin(self) -> Stream:
        session = self._session
        ids, chosen = session._begin_turn(self._params)
        stream = session._llm._stream_prompt(ids, chosen, session._options.request)
        session._is_busy, self._num_closed = True, session._num_closed
        return stream

    async def _end(self, output: RequestOutput) -> None:
        session = self._session
        before = session.mark()
        self._is_over = True  # the request has ended: nothing to abort
        try:
            if session._end_turn(output):
                await session._pin(self._num_closed)
        except BaseException:  # cancelled: the caller gets no answer, so the session has none
            session._transcript.rollback(before)
            raise
        finally:
            session._is_busy = False

    def _leave(self) -> None:
        if self._stream is not None and not self._is_over:
            self._session._is_busy = False
            self._stream.leave()
        self._is_over = True


def open_transcript(
    tokenizer: Tokenizer | None,
    begin: Prompt,
    messages: Sequence[Message] | None,
    system: str | None,
    template_options: dict[str, object],
) -> Transcript:
    """The transcript that a new session begins with; arguments and errors as `LLM.session`."""
    if system is not None:
        messages = [{"role": "system", "content": system}, *(messages or ())]
    check_template_options(template_options)
    for name, value in template_options.items():
        if messages is None:
            raise InvalidParamsError(name, value, "left out without messages")
        if name == "add_generation_prompt":
            raise InvalidParamsError(name, value, "left out: a turn is an answer")
    if messages is not None and (not isinstance(begin, str) or begin):
        raise InvalidParamsError("begin", begin, "left out: a conversation begins with messages")
    return Transcript(tokenizer, begin=begin, messages=messages, template_options=template_options)
