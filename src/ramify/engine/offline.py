"""Stepping a core from one thread: for whole answers, or step by step; keeps what nobody took."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ramify.engine.core import EngineCore, StepOutput
from ramify.engine.text.prompt_inputs import (
    Prompt,
    broadcast_option,
    encode,
    params_for,
    refused_output,
)
from ramify.errors import OutOfPagesError, RequestError, UnknownRequestError
from ramify.params import RequestOutput, SamplingParams

if TYPE_CHECKING:
    from rich.console import Console

    from ramify.engine.text.tokenizer import Tokenizer

MAX_KEPT_OUTPUTS = 4096  # of requests driven by `step` whose outputs nobody has taken


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """The options of one call, each for all prompts or for each."""

    params: SamplingParams | Sequence[SamplingParams] | None
    priority: int | Sequence[int]
    tenant: str | Sequence[str]
    salt: str | Sequence[str]
    progress: bool | None
    on_finished: Callable[[RequestOutput], None] | None

    def each(self, count: int) -> list[tuple[SamplingParams, dict[str, Any]]]:
        """Parameters and options of each prompt."""
        named = {
            name: broadcast_option(name, getattr(self, name), count)
            for name in ("priority", "tenant", "salt")
        }
        options = [{name: values[i] for name, values in named.items()} for i in range(count)]
        return list(zip(params_for(count, self.params), options, strict=True))


class OfflineDriver:
    """Drives a core; requests of a whole answer and those of `step` may be live together."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self._outputs: OrderedDict[int, RequestOutput] = OrderedDict()
        self._unread: list[StepOutput] = []

    def add(
        self, prompt: Prompt, params: SamplingParams, tokenizer: Tokenizer | None, **options: Any
    ) -> int:
        """Queue one prompt; see `LLM.add_request`."""
        text = prompt if isinstance(prompt, str) else None
        return self.core.add_request(encode(prompt, tokenizer), params, prompt=text, **options)

    def run(
        self,
        many: Sequence[Prompt | Callable[[], Sequence[int]]],
        batch_options: BatchOptions,
        tokenizer: Tokenizer | None,
    ) -> list[RequestOutput]:
        """Outputs of prompts, or of what makes them, which may refuse too."""
        each = batch_options.each(len(many))
        outputs: dict[int, RequestOutput] = {}
        places: dict[int, int] = {}
        refused: list[RequestError] = []
        others = {one.id for one in self.core.live}
        with progress_bar(len(many), batch_options.progress) as count:

            def on_finished(output: RequestOutput) -> None:
                count(output)
                if batch_options.on_finished is not None:
                    batch_options.on_finished(output)

            try:
                for place, (prompt, (one, options)) in enumerate(zip(many, each, strict=True)):
                    try:
                        ids = prompt() if callable(prompt) else prompt
                        places[self.add(ids, one, tokenizer, **options)] = place
                    except RequestError as error:
                        refused.append(error)
                        outputs[place] = refused_output(prompt, error)
                if many and len(refused) == len(many):
                    raise refused[0]
                for place in list(outputs):
                    on_finished(outputs[place])
                self._finish(places, outputs, on_finished)
            except BaseException:
                mine = set(places)
                if len(places) + len(refused) < len(many):  # one may be queued, but not noted
                    mine.update(one.id for one in self.core.live if one.id not in others)
                for request_id in mine:
                    if places.get(request_id) not in outputs:
                        with suppress(UnknownRequestError):  # ended in the step that was cut off
                            self.core.abort(request_id)
                self.core.discard_outputs(mine)
                self._unread = [one for one in self._unread if one.request_id not in mine]
                raise
        return [outputs[place] for place in range(len(many))]

    def _finish(
        self,
        places: Mapping[int, int],
        outputs: dict[int, RequestOutput],
        on_finished: Callable[[RequestOutput], None],
    ) -> None:
        """Step until every request of `places` (id → place) has its output."""
        live = set(places)
        while live:
            ended = []
            for event in self._events(places):
                if event.request_id not in places:
                    self._unread.append(event)
                elif event.output is not None:
                    ended.append(event.output)
            for output in ended:
                outputs[places[output.request_id]] = output
                live.discard(output.request_id)
            for output in ended:
                on_finished(output)
            for request_id in live & self._outputs.keys():  # aborted by `on_finished`
                outputs[places[request_id]] = self._outputs.pop(request_id)
                live.discard(request_id)

    def _events(self, places: Container[int]) -> list[StepOutput]:
        """Those of one step, or those that a call made by `on_finished` has left for this one."""
        mine = [one for one in self._unread if one.request_id in places]
        if mine:
            self._unread = [one for one in self._unread if one.request_id not in places]
            return mine
        try:
            return self.core.step()
        except OutOfPagesError as error:  # pins hold what a single request needs
            self.core.recovery.fail_blocked_request(error)
            return []

    def step(self) -> list[StepOutput]:
        """See `LLM.step`."""
        events = self._unread or self.core.step()
        self._unread = []
        for event in events:
            if event.output is not None:
                self._keep(event.output)
        return events

    def step_unread(self) -> None:
        """One step whose events are told to whoever steps next."""
        self._unread += self.core.step()

    @property
    def has_unfinished(self) -> bool:
        """Whether `step` has anything to do or to tell."""
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
        wanted: None shows the bar for two prompts or more, if stderr is a terminal; True always,
            where there is no terminal as one line at the end.
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
            advance(note=f"{generated:,} tokens{share}")

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
