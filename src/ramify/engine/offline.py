"""Offline batches: the driver behind `LLM.generate` and `LLM.step`, with its progress bar."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ramify.counts import counted
from ramify.engine.core import EngineCore
from ramify.engine.request_options import RequestOptions
from ramify.engine.text.prompt_inputs import (
    Prompt,
    broadcast_option,
    encode,
    params_for,
    refused_output,
)
from ramify.errors import EngineStoppedError, RequestError, UnknownRequestError
from ramify.outputs import RequestOutput, StepOutput
from ramify.params import SamplingParams

if TYPE_CHECKING:
    from rich.console import Console

    from ramify.engine.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

CLOSED = "this LLM was closed; make another one"
MAX_KEPT_OUTPUTS = 4096  # outputs under `step` that `take_output` has not fetched


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """Options of one call of `generate`; the first two have an entry for each prompt."""

    params: Sequence[SamplingParams]
    requests: Sequence[RequestOptions]
    progress: bool | None = None
    on_finished: Callable[[RequestOutput], None] | None = None

    @classmethod
    def of(
        cls,
        count: int,
        params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        progress: bool | None,
        on_finished: Callable[[RequestOutput], None] | None,
        **named: Any,
    ) -> BatchOptions:
        """Options of `count` prompts.

        Args:
            params: one for all prompts, or a list with one for each; None is `SamplingParams()`.
            named: fields of `RequestOptions`, in the same way: a value, or a list of values.

        Raises:
            InvalidParamsError: a list is not as long as the list of prompts.
        """
        columns = {name: broadcast_option(name, value, count) for name, value in named.items()}
        requests = [
            RequestOptions(**{name: values[at] for name, values in columns.items()})
            for at in range(count)
        ]
        return cls(params_for(count, params), requests, progress, on_finished)


class OfflineDriver:
    """Drives a core; requests of `run` and of `step` may be live at the same time."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self._outputs: OrderedDict[int, RequestOutput] = OrderedDict()  # for `take_output`
        self._unread: list[StepOutput] = []  # for the next call that reads them
        self._abandoned: list[int] = []  # requests of streams that were left
        self._is_closed = False

    def add(
        self,
        prompt: Prompt,
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        options: RequestOptions,
    ) -> int:
        """Queue one prompt; see `LLM.add_request`."""
        if self._is_closed:  # a stream that was made before and begins after it
            raise EngineStoppedError(CLOSED)
        text = prompt if isinstance(prompt, str) else None
        return self.core.add_request(encode(prompt, tokenizer), params, options, prompt=text)

    def run(
        self,
        prompts: Sequence[Prompt | Callable[[], Sequence[int]]],
        batch_options: BatchOptions,
        tokenizer: Tokenizer | None,
    ) -> list[RequestOutput]:
        """Answer all prompts; returns their outputs in order.

        Args:
            prompts: a callable returns token ids, or raises RequestError, when it is its turn.

        A prompt that is refused has an output with the error; the log names the first.
        """
        outputs: dict[int, RequestOutput] = {}  # by index of the prompt
        index_of: dict[int, int] = {}  # request id → index of the prompt
        refused: list[RequestError] = []
        earlier = {request.id for request in self.core.live}
        with progress_bar(len(prompts), batch_options.progress) as count:

            def on_finished(output: RequestOutput) -> None:
                count(output)
                if batch_options.on_finished is not None:
                    batch_options.on_finished(output)

            try:
                for index, (prompt, params, options) in enumerate(
                    zip(prompts, batch_options.params, batch_options.requests, strict=True)
                ):
                    try:
                        ids = prompt() if callable(prompt) else prompt
                        index_of[self.add(ids, params, tokenizer, options)] = index
                    except RequestError as error:
                        refused.append(error)
                        outputs[index] = refused_output(prompt, error)
                if refused:
                    logger.warning(
                        "%d of %d prompts are refused, see `error` of their outputs; the first: %s",
                        len(refused), len(prompts), refused[0],
                    )  # fmt: skip
                for index in list(outputs):
                    on_finished(outputs[index])
                self._finish(index_of, outputs, on_finished)
            except BaseException:
                mine = set(index_of)
                # Ctrl-C may have come after a request was queued and before its id was stored.
                if len(index_of) + len(refused) < len(prompts):
                    mine.update(
                        request.id for request in self.core.live if request.id not in earlier
                    )
                for request_id in mine:
                    if index_of.get(request_id) not in outputs:
                        with suppress(UnknownRequestError):  # ended in the step that was cut off
                            self.core.abort(request_id)
                self.core.discard_outputs(mine)
                self._unread = [event for event in self._unread if event.request_id not in mine]
                raise
        return [outputs[index] for index in range(len(prompts))]

    def _finish(
        self,
        index_of: Mapping[int, int],
        outputs: dict[int, RequestOutput],
        on_finished: Callable[[RequestOutput], None],
    ) -> None:
        """Step until every request of `index_of` has its output in `outputs`."""
        live = set(index_of)
        while live:
            ended = []
            for event in self._events(index_of):
                if event.request_id not in index_of:
                    self._unread.append(event)
                elif event.output is not None:
                    ended.append(event.output)
            for output in ended:
                outputs[index_of[output.request_id]] = output
                live.discard(output.request_id)
            for output in ended:
                on_finished(output)
            for request_id in live & self._outputs.keys():  # aborted by `on_finished`
                outputs[index_of[request_id]] = self._outputs.pop(request_id)
                live.discard(request_id)

    def _events(self, request_ids: Container[int]) -> list[StepOutput]:
        """Unread outputs of these requests, left by another call; else a step."""
        self._drop_abandoned()
        mine = [event for event in self._unread if event.request_id in request_ids]
        if mine:
            self._unread = [event for event in self._unread if event.request_id not in request_ids]
            return mine
        return self.core.step_or_fail_blocked()

    def step(self) -> list[StepOutput]:
        """See `LLM.step`."""
        self._drop_abandoned()
        events = self._unread or self.core.step()
        self._unread = []
        for event in events:
            if event.output is not None:
                self._keep(event.output)
        return events

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        options: RequestOptions,
    ) -> Iterator[StepOutput]:
        """Yield the increments of one prompt; see `LLM.stream`. Each step is a call of its own."""
        turns = self.core.turns
        add = partial(self.add, prompt, params, tokenizer, options)
        queued: list[int] = []  # the id; an interrupt may come before `run` returns
        is_over = False
        try:
            turns.run("LLM.stream", partial(self._add_into, queued, add))
            while not is_over:
                for event in turns.run("LLM.stream", partial(self._own_events, queued[0])):
                    is_over = event.output is not None
                    yield event
        finally:
            # Not aborted here: the garbage collector may close this generator in the middle of a step.
            if not is_over:
                self._abandoned += queued

    def _add_into(self, queued: list[int], add: Callable[[], int]) -> None:
        """Append the id of the request that `add` queues; also where that is interrupted."""
        earlier = {request.id for request in self.core.live}
        try:
            queued.append(add())
        except BaseException:
            queued[:] = (request.id for request in self.core.live if request.id not in earlier)
            raise

    def _own_events(self, request_id: int) -> list[StepOutput]:
        """The next events of a request; those of others go to the next call that reads them."""
        if request_id in self._outputs:  # ended by `abort`
            output = self._outputs.pop(request_id)
            return [StepOutput(request_id, (), output, finish_reason=output.finish_reason)]
        events = self._events((request_id,))
        self._unread += [event for event in events if event.request_id != request_id]
        mine = [event for event in events if event.request_id == request_id]
        if not mine and not self.core.has_unfinished:  # `take_output` has taken the output
            raise UnknownRequestError(request_id)
        return mine

    def _drop_abandoned(self) -> None:
        """Abort the requests of streams that were left; nothing of them stays."""
        while self._abandoned:
            request_id = self._abandoned.pop()
            # A request that has ended since is not live.
            with suppress(UnknownRequestError):
                self.core.abort(request_id)
            self.core.discard_outputs({request_id})
            self._outputs.pop(request_id, None)
            self._unread = [event for event in self._unread if event.request_id != request_id]

    def close(self) -> None:
        """Abort every live request; streams end with their outputs, and none begins."""
        self._is_closed = True
        try:
            self._drop_abandoned()
            for request in self.core.live:
                if request.parent is None:
                    self._keep(self.core.abort(request.id))
        except BaseException:
            self.core.abandon()
            raise
        self.core.close()

    def step_unread(self) -> None:
        """Run one step; its outputs go to the next call that reads them."""
        self._drop_abandoned()
        self._unread += self.core.step()

    @property
    def has_unfinished(self) -> bool:
        """See `LLM.has_unfinished`."""
        return bool(self._unread) or self.core.has_unfinished

    def take_output(self, request_id: int) -> RequestOutput:
        """See `LLM.take_output`."""
        if request_id not in self._outputs:
            raise UnknownRequestError(request_id)
        return self._outputs.pop(request_id)

    def abort(self, request_id: int) -> None:
        """See `LLM.abort`."""
        self._keep(self.core.abort(request_id))

    def _keep(self, output: RequestOutput) -> None:
        self._outputs[output.request_id] = output
        while len(self._outputs) > MAX_KEPT_OUTPUTS:
            self._outputs.popitem(last=False)


@contextmanager
def progress_bar(total: int, wanted: bool | None) -> Iterator[Callable[[RequestOutput], None]]:
    """A bar over `total` prompts; yields the function that counts an output.

    Args:
        wanted: None shows the bar for two prompts or more, if stderr is a terminal. True shows it
            always; without a terminal, one line at the end.
    """
    if wanted is False or (wanted is None and total < 2):
        yield lambda output: None
        return
    from rich.console import Console

    console = Console(stderr=True)
    if wanted is None and not console.is_terminal:
        yield lambda output: None
        return
    generated, cached, prompt = 0, 0, 0
    with rich_bar(console, total, "answers") as advance:

        def count(output: RequestOutput) -> None:
            nonlocal generated, cached, prompt
            generated += output.usage.completion_tokens
            cached += output.usage.cached_tokens
            prompt += output.usage.prompt_tokens
            share = f", {cached / prompt:.0%} of the prompts cached" if prompt else ""
            advance(note=f"{counted(generated, 'token')}{share}")

        yield count


@contextmanager
def rich_bar(
    console: Console, total: int, description: str, *, transient: bool = False
) -> Iterator[Callable[..., None]]:
    """A bar with a count and the elapsed time; yields `advance`, which counts one item.

    `advance(description=..., note=...)` also sets the text before or after the bar.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
        console=console,
        transient=transient,
    ) as bar:
        task = bar.add_task(description, total=total, note="")
        yield lambda **texts: bar.update(task, advance=1, **texts)
