"""Sessions: prompts that grow turn by turn, branch and go back; each token is computed once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self

from ramify.cache.pins import Pin
from ramify.engine.cache_admin.view import AsyncCacheView, CacheView
from ramify.engine.call_turns import CallTurns, whole_call
from ramify.engine.serving.streams import Stream
from ramify.engine.sessions.transcript import Savepoint, Transcript
from ramify.engine.text.prompt_inputs import Message, Prompt
from ramify.errors import EngineStoppedError, InvalidParamsError, PinError
from ramify.outputs import FinishReason, RequestOutput, StepOutput
from ramify.params import SamplingParams

if TYPE_CHECKING:
    from ramify.engine.text.tokenizer import Tokenizer


class AnswersPrompts(Protocol):
    """The calls that a `Session` makes; `LLM` has them."""

    turns: CallTurns

    @property
    def cache(self) -> CacheView:
        """Has `pin` and `unpin`."""
        ...

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        priority: int,
        tenant: str,
        salt: str,
        progress: bool,
    ) -> list[RequestOutput]:
        """See `LLM.generate`."""
        ...


class StreamsAnswers(Protocol):
    """The calls that an `AsyncSession` makes; `AsyncLLM` has them."""

    @property
    def cache(self) -> AsyncCacheView:
        """Has `pin` and `unpin`."""
        ...

    def stream(
        self, prompt: Prompt, params: SamplingParams, *, priority: int, tenant: str, salt: str
    ) -> Stream:
        """See `AsyncLLM.stream`."""
        ...


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """Options of every turn of a session and of its forks.

    Raises:
        InvalidParamsError: `ttl_s` is not None and not a number of seconds > 0.
    """

    priority: int = 0
    tenant: str = ""
    salt: str = ""
    pin: bool = False
    ttl_s: float | None = None

    def __post_init__(self) -> None:
        ttl_s: Any = self.ttl_s
        is_number = isinstance(ttl_s, int | float) and not isinstance(ttl_s, bool)
        if ttl_s is not None and not (is_number and ttl_s > 0):
            raise InvalidParamsError("ttl_s", ttl_s, "None or more than 0 seconds")


class _SessionCore:
    """State that `Session` and `AsyncSession` share: the transcript and the pin of the last turn."""

    def __init__(self, transcript: Transcript, options: SessionOptions) -> None:
        self.transcript, self.options = transcript, options
        self.pinned: Pin | None = None
        self.pin_refused: str | None = None
        self.is_busy = False
        # Calls of `aclose`: an answer that was begun before the last of them is not pinned.
        self.num_closed = 0

    def begin(self, params: SamplingParams | None) -> tuple[Sequence[int], SamplingParams]:
        """Prompt ids and parameters of the next turn.

        Raises:
            RequestError: there is no prompt, `params` ask for several answers, or one is running.
        """
        chosen: Any = SamplingParams() if params is None else params
        if not isinstance(chosen, SamplingParams):
            raise InvalidParamsError("params", params, "SamplingParams or None")
        if chosen.n != 1:
            raise InvalidParamsError("n", chosen.n, "1: a session has one answer; fork it for more")
        self.require_idle("generate")
        return self.transcript.prompt_ids(), chosen

    def require_idle(self, call: str) -> None:
        """Raise InvalidParamsError while an answer is running: it continues the present transcript."""
        if self.is_busy:
            allowed = "left until the running answer has ended: await it, or fork"
            raise InvalidParamsError(call, "called", allowed)

    def end(self, output: RequestOutput) -> bool:
        """Add an answer to the transcript unless it failed or was aborted; returns whether to pin it."""
        if output.error is not None or output.finish_reason is FinishReason.ABORT:
            return False
        self.transcript.add_answer(output)
        return self.options.pin


class Session:
    """A growing prompt over an `LLM`; made by `LLM.session`.

    A plain session is a sequence of token ids: appended text is tokenised by itself, generated ids
    are kept. A conversation is a list of messages for the chat template; `Transcript` says which
    parts of it are tokenised again, and when.

    The K/V of earlier turns is read from the cache unless it was evicted. A turn computes the new
    tokens, and those before them that do not fill a page. Forks share K/V in the same way; nothing
    is copied. With `pin`, the newest turn is not evicted, as far as the budget for pins allows.
    """

    def __init__(
        self, llm: AnswersPrompts, transcript: Transcript, options: SessionOptions
    ) -> None:
        self._llm, self._core = llm, _SessionCore(transcript, options)
        self.turns = llm.turns

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All token ids so far; in a conversation, up to the last answer."""
        return tuple(self._core.transcript.token_ids)

    @property
    def messages(self) -> list[Message]:
        """The messages of a conversation, answers included."""
        return self._core.transcript.messages

    @property
    def pin_refused(self) -> str | None:
        """Why the last turn could not be pinned; None if it was, or `pin` is off."""
        return self._core.pin_refused

    @whole_call
    def append(self, more: Prompt | Message | Sequence[Message]) -> None:
        """Add to the prompt of the next turn.

        Args:
            more: a text or token ids; in a conversation a message, several messages, or the text
                of a user's message.
        """
        self._core.transcript.append(more)

    @whole_call
    def generate(self, params: SamplingParams | None = None) -> RequestOutput:
        """Answer, and add the answer to the session, unless it failed (`output.error`).

        Raises:
            RequestError: the turn can never be served; the session is unchanged.
        """
        turns, options = self._core, self._core.options
        ids, chosen = turns.begin(params)
        [output] = self._llm.generate(
            [ids],
            chosen,
            priority=options.priority,
            tenant=options.tenant,
            salt=options.salt,
            progress=False,
        )
        before = turns.transcript.mark()
        if turns.end(output):
            try:
                self._pin()
            except BaseException:  # Ctrl-C: the caller gets no answer, so the session has none
                turns.transcript.rollback(before)
                raise
        return output

    @whole_call
    def mark(self) -> Savepoint:
        """The present length of the session, for `rollback`."""
        return self._core.transcript.mark()

    @whole_call
    def rollback(self, to: Savepoint | int) -> None:
        """Go back to a `mark`, or drop the last `to` tokens (in a conversation, messages).

        Raises:
            InvalidParamsError: the session is shorter than that.
        """
        self._core.transcript.rollback(to)

    @whole_call
    def fork(self, count: int = 2) -> list[Session]:
        """`count` new sessions that continue from here independently; this one is unchanged."""
        turns = self._core
        return [
            Session(self._llm, turns.transcript.copy(), turns.options)
            for _ in range(_validate_count(count))
        ]

    @whole_call
    def close(self) -> None:
        """Unpin the last turn. Its K/V stays cached until it is evicted."""
        turns = self._core
        if turns.pinned is not None:
            pin, turns.pinned = turns.pinned, None
            _unpin(self._llm, pin)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _pin(self) -> None:
        turns, options = self._core, self._core.options
        turns.pin_refused, before = None, turns.pinned
        try:
            turns.pinned = self._llm.cache.pin(
                turns.transcript.token_ids,
                owner="session",
                ttl_s=options.ttl_s,
                tenant=options.tenant,
                salt=options.salt,
            )
        except PinError as error:
            turns.pin_refused = str(error)
            return
        if before is not None:
            _unpin(self._llm, before)


class AsyncSession:
    """A `Session` over an `AsyncLLM`: answers are awaited or streamed."""

    def __init__(
        self, llm: StreamsAnswers, transcript: Transcript, options: SessionOptions
    ) -> None:
        self._llm, self._core = llm, _SessionCore(transcript, options)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """See `Session.token_ids`."""
        return tuple(self._core.transcript.token_ids)

    @property
    def messages(self) -> list[Message]:
        """See `Session.messages`."""
        return self._core.transcript.messages

    @property
    def pin_refused(self) -> str | None:
        """See `Session.pin_refused`."""
        return self._core.pin_refused

    def append(self, more: Prompt | Message | Sequence[Message]) -> None:
        """See `Session.append`.

        Raises:
            InvalidParamsError: an answer is running, or `more` is malformed.
        """
        self._core.require_idle("append")
        self._core.transcript.append(more)

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

    def mark(self) -> Savepoint:
        """See `Session.mark`."""
        return self._core.transcript.mark()

    def rollback(self, to: Savepoint | int) -> None:
        """See `Session.rollback`. Raises InvalidParamsError while an answer is running, too."""
        self._core.require_idle("rollback")
        self._core.transcript.rollback(to)

    def fork(self, count: int = 2) -> list[AsyncSession]:
        """See `Session.fork`."""
        turns = self._core
        return [
            AsyncSession(self._llm, turns.transcript.copy(), turns.options)
            for _ in range(_validate_count(count))
        ]

    async def aclose(self) -> None:
        """See `Session.close`; a running answer will not be pinned."""
        turns = self._core
        turns.num_closed += 1
        if turns.pinned is not None:
            pin, turns.pinned = turns.pinned, None
            await self._unpin(pin)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _pin(self, num_closed: int) -> None:
        turns, options = self._core, self._core.options
        turns.pin_refused, before = None, turns.pinned
        try:
            pin = await self._llm.cache.pin(
                turns.transcript.token_ids,
                owner="session",
                ttl_s=options.ttl_s,
                tenant=options.tenant,
                salt=options.salt,
            )
        except (PinError, EngineStoppedError) as error:  # the answer itself is not lost
            turns.pin_refused = str(error)
            return
        if num_closed != turns.num_closed:
            before = pin
        else:
            turns.pinned = pin
        if before is not None:
            await self._unpin(before)

    async def _unpin(self, pin: Pin) -> None:
        async def end() -> None:
            with suppress(PinError, EngineStoppedError):  # expired, or the engine has ended
                await self._llm.cache.unpin(pin)

        # Nobody else knows this pin, so a cancelled caller must still end it.
        await asyncio.shield(end())


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
        """Abort the request, if it has not ended."""
        self._leave()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._leave()

    def __del__(self) -> None:
        self._leave()

    def _begin(self) -> Stream:
        turns, options = self._session._core, self._session._core.options  # noqa: SLF001
        ids, chosen = turns.begin(self._params)
        stream = self._session._llm.stream(  # noqa: SLF001
            ids, chosen, priority=options.priority, tenant=options.tenant, salt=options.salt
        )
        turns.is_busy, self._num_closed = True, turns.num_closed
        return stream

    async def _end(self, output: RequestOutput) -> None:
        turns = self._session._core  # noqa: SLF001
        before = turns.transcript.mark()
        self._is_over = True  # the request has ended: nothing to abort
        try:
            if turns.end(output):
                await self._session._pin(self._num_closed)  # noqa: SLF001
        except BaseException:  # cancelled: the caller gets no answer, so the session has none
            turns.transcript.rollback(before)
            raise
        finally:
            turns.is_busy = False

    def _leave(self) -> None:
        if self._stream is not None and not self._is_over:
            self._session._core.is_busy = False  # noqa: SLF001
            self._stream.leave()
        self._is_over = True


def _unpin(llm: AnswersPrompts, pin: Pin) -> None:
    with suppress(PinError):  # it has expired
        llm.cache.unpin(pin)


def _validate_count(count: int) -> int:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise InvalidParamsError("count", count, "an integer >= 1")
    return count


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
    for name, value in template_options.items():
        if messages is None:
            raise InvalidParamsError(name, value, "left out without messages")
        if name == "add_generation_prompt":
            raise InvalidParamsError(name, value, "left out: a turn is an answer")
    if messages is not None and (not isinstance(begin, str) or begin):
        raise InvalidParamsError("begin", begin, "left out: a conversation begins with messages")
    return Transcript(tokenizer, begin=begin, messages=messages, template_options=template_options)
