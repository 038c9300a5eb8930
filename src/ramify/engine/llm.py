"""`LLM`: a checkpoint, its cache and its engine behind one object, for one thread."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ramify.cache.prefix_cache import PrefixCache
from ramify.config import (
    AttentionSection,
    CacheSection,
    EngineConfig,
    ModelSection,
    ResolvedConfig,
    SchedulerSection,
)
from ramify.engine.core import EngineCore, StepOutput
from ramify.engine.progress import answers_bar
from ramify.engine.prompts import (
    Message,
    Prompt,
    as_list,
    each_of,
    encode,
    encode_talk,
    params_for,
    refusal,
)
from ramify.engine.recheck import Rechecks
from ramify.engine.stats import EngineStats
from ramify.errors import (
    ConfigError,
    InvalidParamsError,
    RequestError,
    UnknownRequestError,
)
from ramify.params import RequestOutput, SamplingParams

if TYPE_CHECKING:  # what needs tensors is loaded with the model
    import torch

    from ramify.attention.backend import AttentionSpec, Choice
    from ramify.attention.exact import Exactness
    from ramify.engine.build import Engine
    from ramify.engine.runner import ModelRunner
    from ramify.engine.tokenizer import Tokenizer
    from ramify.models.config import ModelConfig
    from ramify.models.loader import Decoder

_MODEL, _CACHE = ModelSection(), CacheSection()
_SCHEDULER, _ATTENTION = SchedulerSection(), AttentionSection()
MAX_KEPT_OUTPUTS = 4096  # of requests driven by `step` whose outputs nobody has taken
T = TypeVar("T")


class LLM:
    """Answers prompts with a Hugging Face checkpoint; prefixes are computed once.

    Args:
        model: a checkpoint directory, the id of a cached hub model, or "ramify-tiny".
        progress: bars on stderr while weights load, if it is a terminal.
        others: further options of `ramify.config`, where all defaults and their reasons stand; a
            name that is unknown there is an error.

    Raises:
        ConfigError: an option is unknown or has a value that cannot work.
        ModelError: the checkpoint is missing, damaged or of an unsupported architecture.
    """

    def __init__(
        self,
        model: str | Path = _MODEL.model,
        *,
        dtype: str | torch.dtype = _MODEL.dtype,
        max_model_len: int | None = _MODEL.max_model_len,
        page_size: int = _CACHE.page_size,
        kv_cache_tokens: int | None = _CACHE.kv_cache_tokens,
        kv_cache_memory: int | None = _CACHE.kv_cache_memory,
        prefix_cache: bool = _CACHE.prefix_cache,
        max_num_seqs: int = _SCHEDULER.max_num_seqs,
        max_batch_tokens: int = _SCHEDULER.max_batch_tokens,
        attention_backend: str = _ATTENTION.attention_backend,
        exact: bool = _ATTENTION.exact,
        progress: bool = False,
        **others: Any,
    ) -> None:
        if not isinstance(model, str | Path):
            raise ConfigError(f"model={model!r} but it must be a directory or a name")
        asked = EngineConfig.of(
            model=str(model),
            dtype=dtype,
            max_model_len=max_model_len,
            page_size=page_size,
            kv_cache_tokens=kv_cache_tokens,
            kv_cache_memory=kv_cache_memory,
            prefix_cache=prefix_cache,
            max_num_seqs=max_num_seqs,
            max_batch_tokens=max_batch_tokens,
            attention_backend=attention_backend,
            exact=exact,
            **others,
        )
        from ramify.engine.build import Engine

        self._engine: Engine | None = Engine(asked, progress=progress)
        self._begin(self._engine.core, self._engine.tokenizer)

    @classmethod
    def over(cls, core: EngineCore, tokenizer: Tokenizer | None = None) -> LLM:
        """The same calls over an engine of your own; it has no model to ask about."""
        made = cls.__new__(cls)
        made._engine = None  # noqa: SLF001 - its own class
        made._begin(core, tokenizer)  # noqa: SLF001
        return made

    def _begin(self, core: EngineCore, tokenizer: Tokenizer | None) -> None:
        self.core, self.tokenizer = core, tokenizer
        self.config: ResolvedConfig = core.config
        self._outputs: OrderedDict[int, RequestOutput] = OrderedDict()
        self._unread: list[StepOutput] = []

    # -- what it is made of ------------------------------------------------------------------

    @property
    def engine(self) -> Engine:
        """What was made of the checkpoint.

        Raises:
            ConfigError: nothing was: see `over`.
        """
        if self._engine is None:
            raise ConfigError("this LLM was made over an engine without a model")
        return self._engine

    @property
    def path(self) -> Path:
        """The checkpoint's directory."""
        return self.engine.path

    @property
    def model_config(self) -> ModelConfig:
        """Sizes and variants of the model."""
        return self.engine.model_config

    @property
    def decoder(self) -> Decoder:
        """The model."""
        return self.engine.decoder

    @property
    def runner(self) -> ModelRunner:
        """Model, K/V pool and attention backend."""
        return self.engine.runner

    @property
    def attention(self) -> Choice:
        """The attention backend, and why it was chosen."""
        return self.engine.attention

    @property
    def attention_spec(self) -> AttentionSpec:
        """What the model asks of attention."""
        return self.engine.attention_spec

    @property
    def cache(self) -> PrefixCache:
        """The prefix cache: `stats()`, `clear()`, `check()`."""
        return self.core.cache

    @property
    def num_weight_bytes(self) -> int:
        """Memory of the weights in the dtype that they compute in."""
        return self.engine.num_weight_bytes

    def exactness(self) -> list[Exactness]:
        """How each operation of the model and its attention is computed, and why."""
        return self.engine.exactness()

    def stats(self) -> EngineStats:
        """Requests that run and wait, work done so far, and `PrefixCache.stats()`."""
        return EngineStats.of(self.core)

    def run(self, call: Callable[[EngineCore], T]) -> T:
        """`call(core)`: the same as `AsyncLLM.run`, at once."""
        return call(self.core)

    @property
    def rechecks(self) -> Rechecks:
        """What came of the hits that were computed again; see `verify_sample` and `recheck`."""
        return self.core.rechecks

    def recheck(self) -> Rechecks:
        """Compute the sampled hits again that wait for it: for moments in which nothing else runs.

        Does nothing while requests are live.
        """
        while self.core.recheck():
            while self.core.has_unfinished:
                self.core.step()
        return self.core.rechecks

    # -- whole answers -----------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        tenant: str | Sequence[str] = "",
        salt: str | Sequence[str] = "",
        progress: bool | None = None,
        on_finished: Callable[[RequestOutput], None] | None = None,
    ) -> list[RequestOutput]:
        """Answer one prompt or many, in one continuous batch; outputs in the order of prompts.

        Args:
            prompts: a text, token ids, or a list of either.
            params: one for all, or one per prompt; None is `SamplingParams()`.
            priority: larger ones first; for all, or one per prompt.
            tenant: whose the prompt is: tenants never share prefixes; for all, or one per prompt.
            salt: only prompts with the same one share prefixes; for all, or one per prompt.
            progress: a bar on stderr; None: for two prompts or more, if stderr is a terminal.
            on_finished: called with each output as it ends.

        A prompt that cannot be served gets an output whose `error` says why, and the others go
        on. An interrupt or an error in `on_finished` ends the requests of the call; the `LLM`
        stays as good as before.

        Raises:
            RequestError: no prompt of the call could be served; this is the first one's error.
        """
        asked = _Asked(params, priority, tenant, salt, progress, on_finished)
        return self._answer(as_list(prompts), asked)

    def _answer(
        self, many: Sequence[Prompt | Callable[[], Sequence[int]]], asked: _Asked
    ) -> list[RequestOutput]:
        """Outputs of prompts, or of what makes them, which may refuse too."""
        each = asked.each(len(many))
        outputs: dict[int, RequestOutput] = {}
        places: dict[int, int] = {}
        refused: list[RequestError] = []
        with answers_bar(len(many), asked.progress) as count:

            def on_finished(output: RequestOutput) -> None:
                count(output)
                if asked.on_finished is not None:
                    asked.on_finished(output)

            try:
                for place, (prompt, (one, options)) in enumerate(zip(many, each, strict=True)):
                    try:
                        ids = prompt() if callable(prompt) else prompt
                        places[self.add_request(ids, one, **options)] = place
                    except RequestError as error:
                        refused.append(error)
                        outputs[place] = refusal(prompt, error)
                if many and len(refused) == len(many):
                    raise refused[0]
                self._finish(places, outputs, on_finished)
            except BaseException:
                for request_id, place in places.items():
                    if place not in outputs:
                        with suppress(UnknownRequestError):  # ended in the step that was cut off
                            self.core.abort(request_id)
                self.core.forget(places)
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
            for event in self.core.step():
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

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        tenant: str | Sequence[str] = "",
        salt: str | Sequence[str] = "",
        progress: bool | None = None,
        on_finished: Callable[[RequestOutput], None] | None = None,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or a list of them, through the model's chat template.

        Args:
            template_options: `tools`, and further variables of the template; the others are those
                of `generate`.

        Raises:
            RequestError: as `generate`; also when there is no chat template, or it refuses the
                messages.
        """
        if not isinstance(messages, list | tuple) or not messages:
            raise InvalidParamsError("messages", messages, "a conversation of at least 1 message")
        if self.tokenizer is None:
            raise InvalidParamsError("messages", "given", "token ids: the model has no tokenizer")
        talks = [messages] if isinstance(messages[0], Mapping) else list(messages)

        def later(talk: Any) -> Callable[[], Sequence[int]]:
            return lambda: encode_talk(talk, self.tokenizer, **template_options)

        # rendered one by one: a conversation that the template refuses does not stop the others
        asked = _Asked(params, priority, tenant, salt, progress, on_finished)
        return self._answer([later(talk) for talk in talks], asked)

    # -- step by step ------------------------------------------------------------------------

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        tenant: str = "",
        salt: str = "",
    ) -> int:
        """Queue one prompt; returns its id. Options as those of `generate`.

        Raises:
            RequestError: it can never be served; nothing is queued.
        """
        return self.core.add_request(
            encode(prompt, self.tokenizer),
            params or SamplingParams(),
            prompt=prompt if isinstance(prompt, str) else None,
            priority=priority,
            tenant=tenant,
            salt=salt,
        )

    def step(self) -> list[StepOutput]:
        """One step of the engine: what it did for whoever got any tokens.

        A `StepOutput` unpacks to (request id, new token ids, finished), and knows more: the index
        of the answer when there are several, text, log probabilities, why an answer ended. The
        last one of a request has its `output`.
        """
        events = self._unread or self.core.step()
        self._unread = []
        for event in events:
            if event.output is not None:
                self._keep(event.output)
        return events

    def has_unfinished(self) -> bool:
        """Whether `step` has anything to do or to tell."""
        return bool(self._unread) or self.core.has_unfinished

    def take_output(self, request_id: int) -> RequestOutput:
        """The output of a request that ended under `step` or `abort`, once.

        Raises:
            UnknownRequestError: it has not ended, was taken, or is too old to be kept.
        """
        if request_id not in self._outputs:
            raise UnknownRequestError(request_id)
        return self._outputs.pop(request_id)

    def abort(self, request_id: int) -> None:
        """End a live request now; its output has the finish reason `abort`.

        Raises:
            UnknownRequestError: no live request has this id.
        """
        self._keep(self.core.abort(request_id))

    def _keep(self, output: RequestOutput) -> None:
        self._outputs[output.request_id] = output
        while len(self._outputs) > MAX_KEPT_OUTPUTS:
            self._outputs.popitem(last=False)


@dataclass(frozen=True, slots=True)
class _Asked:
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
            name: each_of(name, getattr(self, name), count)
            for name in ("priority", "tenant", "salt")
        }
        options = [{name: values[i] for name, values in named.items()} for i in range(count)]
        return list(zip(params_for(count, self.params), options, strict=True))
