"""`LLM`: a checkpoint, its cache and its engine behind one object, for one thread."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from math import prod
from numbers import Integral
from pathlib import Path
from typing import Any

import torch

from ramify.attention.backend import Choice, select_backend
from ramify.attention.exact import Exactness
from ramify.cache.key import namespace_of
from ramify.cache.prefix_cache import PrefixCache
from ramify.config import (
    AttentionSection,
    CacheSection,
    EngineConfig,
    ModelSection,
    ResolvedConfig,
    SchedulerSection,
    resolve,
)
from ramify.engine.core import EngineCore, StepOutput
from ramify.engine.executors import LocalExecutor
from ramify.engine.memory import free_memory
from ramify.engine.recheck import Rechecks
from ramify.engine.runner import ModelRunner
from ramify.engine.structured import Formats
from ramify.engine.tokenizer import Detokenizer, Tokenizer
from ramify.errors import (
    CheckpointError,
    ConfigError,
    EmptyPromptError,
    InvalidParamsError,
    RequestError,
    UnknownRequestError,
)
from ramify.kv.pool import KVPool
from ramify.models.config import ModelConfig
from ramify.models.loader import find_checkpoint, load_model, read_config, resolve_dtype
from ramify.models.needs import attention_of, attention_spec, kv_layout, plane_dtype
from ramify.params import (
    CacheReport,
    Completion,
    FinishReason,
    RequestMetrics,
    RequestOutput,
    SamplingParams,
)

Prompt = str | Sequence[int]
Message = Mapping[str, Any]
_MODEL, _CACHE = ModelSection(), CacheSection()
_SCHEDULER, _ATTENTION = SchedulerSection(), AttentionSection()
MAX_KEPT_OUTPUTS = 4096  # of requests driven by `step` whose outputs nobody has taken


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
        self.path = find_checkpoint(model)
        self.model_config: ModelConfig = read_config(self.path)
        config, exact = self.model_config, asked.attention.exact
        dtype = resolve_dtype(asked.model.dtype, config)
        kv_dtype = plane_dtype(asked.cache.kv_dtype, dtype)
        layout = kv_layout(config)
        self.config: ResolvedConfig = resolve(
            asked,
            model_max_len=config.max_model_len,
            token_bytes=layout.token_bytes(kv_dtype),
            free_memory=free_memory(),
        )
        self.attention_spec = attention_spec(
            config,
            page_size=self.config.page_size,
            dtype=dtype,
            exact=exact,
            kv_dtype=kv_dtype,
        )
        self.attention: Choice = select_backend(
            asked.attention.attention_backend, self.attention_spec, torch.device("cpu")
        )
        self.tokenizer: Tokenizer | None = _load_tokenizer(self.path)
        weights = load_model(self.path, dtype=asked.model.dtype, exact=exact, progress=progress)
        self.decoder = weights
        pool = KVPool(layout, self.config.num_pages, self.config.page_size, dtype=kv_dtype)
        self._attend = attention_of(config, self.attention_spec, self.attention.backend)
        self.runner = ModelRunner(
            weights, pool, self._attend, **({} if exact else {"row_multiple": 1})
        )
        tokenizer = self.tokenizer
        eos_token_ids = config.eos_token_ids or (tokenizer.eos_token_ids if tokenizer else ())
        decoder: Callable[[], Detokenizer] | None = None
        self.formats: Formats | None = None
        if tokenizer is not None:
            decoder = lambda: Detokenizer(tokenizer)  # noqa: E731
            self.formats = Formats(
                tokenizer.to_json, vocab_size=config.vocab_size, eos_token_ids=eos_token_ids
            )
        self.core = EngineCore(
            self.config,
            LocalExecutor(self.runner),
            vocab_size=config.vocab_size,
            eos_token_ids=eos_token_ids,
            namespace=namespace_of(
                model=_fingerprint(self.path), kv_dtype=str(kv_dtype), exact=int(exact)
            ),
            text_decoder=decoder,
            formats=self.formats.compile if self.formats else None,
        )
        self._outputs: OrderedDict[int, RequestOutput] = OrderedDict()
        self._unread: list[StepOutput] = []

    @property
    def cache(self) -> PrefixCache:
        """The prefix cache: `stats()`, `clear()`, `check()`."""
        return self.core.cache

    @property
    def num_weight_bytes(self) -> int:
        """Memory of the weights in the dtype that they compute in."""
        shapes = self.model_config.tensor_shapes().values()
        return sum(prod(shape) for shape in shapes) * self.decoder.dtype.itemsize

    def exactness(self) -> list[Exactness]:
        """How each operation of the model and its attention is computed, and why."""
        return [*self.decoder.exactness(), *self._attend.exactness()]

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
        on_finished: Callable[[RequestOutput], None] | None = None,
    ) -> list[RequestOutput]:
        """Answer one prompt or many, in one continuous batch; outputs in the order of prompts.

        Args:
            prompts: a text, token ids, or a list of either.
            params: one for all, or one per prompt; None is `SamplingParams()`.
            on_finished: called with each output as it ends.

        A prompt that cannot be served gets an output whose `error` says why, and the others go
        on.

        Raises:
            RequestError: no prompt of the call could be served; this is the first one's error.
        """
        return self._answer(_as_list(prompts), params, on_finished)

    def _answer(
        self,
        many: Sequence[Prompt | Callable[[], Prompt]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        on_finished: Callable[[RequestOutput], None] | None,
    ) -> list[RequestOutput]:
        """Outputs of prompts, or of what makes them, which may refuse too."""
        each = _params_for(many, params)
        outputs: dict[int, RequestOutput] = {}
        places: dict[int, int] = {}
        refused: list[RequestError] = []
        try:
            for place, (prompt, one) in enumerate(zip(many, each, strict=True)):
                try:
                    ids = prompt() if callable(prompt) else prompt
                    places[self.add_request(ids, one)] = place
                except RequestError as error:
                    refused.append(error)
                    outputs[place] = _refusal(prompt, error)
            if many and len(refused) == len(many):
                raise refused[0]
            self._finish(places, outputs, on_finished)
        except BaseException:
            for request_id, place in places.items():
                if place not in outputs:
                    with suppress(UnknownRequestError):  # it ended in the step that was cut off
                        self.core.abort(request_id)
            raise
        return [outputs[place] for place in range(len(many))]

    def _finish(
        self,
        places: Mapping[int, int],
        outputs: dict[int, RequestOutput],
        on_finished: Callable[[RequestOutput], None] | None,
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
                if on_finished is not None:
                    on_finished(output)
            for request_id in live & self._outputs.keys():  # aborted by `on_finished`
                outputs[places[request_id]] = self._outputs.pop(request_id)
                live.discard(request_id)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or a list of them, through the model's chat template.

        Raises:
            RequestError: as `generate`; also when there is no chat template, or it refuses the
                messages.
        """
        if not isinstance(messages, list | tuple) or not messages:
            raise InvalidParamsError("messages", messages, "a conversation of at least 1 message")
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise InvalidParamsError("messages", "given", "token ids: the model has no tokenizer")
        talks = [messages] if isinstance(messages[0], Mapping) else list(messages)

        def later(talk: Any) -> Callable[[], Prompt]:
            return lambda: tokenizer.encode_chat(talk, **template_options)

        # rendered one by one: a conversation that the template refuses does not stop the others
        return self._answer([later(talk) for talk in talks], params, None)

    # -- step by step ------------------------------------------------------------------------

    def add_request(self, prompt: Prompt, params: SamplingParams | None = None) -> int:
        """Queue one prompt; returns its id.

        Raises:
            RequestError: it can never be served; nothing is queued.
        """
        text = prompt if isinstance(prompt, str) else None
        return self.core.add_request(self._encode(prompt), params or SamplingParams(), prompt=text)

    def step(self) -> list[tuple[int, list[int], bool]]:
        """One step of the engine: (request id, new token ids, finished) for whoever got any."""
        events = self._unread or self.core.step()
        self._unread = []
        for event in events:
            if event.output is not None:
                self._keep(event.output)
        return [
            (event.request_id, list(event.new_token_ids), event.output is not None)
            for event in events
        ]

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

    def _encode(self, prompt: Prompt) -> Sequence[int]:
        if not isinstance(prompt, str):
            return prompt.tolist() if hasattr(prompt, "tolist") else prompt
        if not prompt:
            raise EmptyPromptError
        if self.tokenizer is None:
            raise InvalidParamsError(
                "prompt", "text", "token ids: the checkpoint has no tokenizer.json"
            )
        return self.tokenizer.encode(prompt)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A single prompt, text or ids, becomes a list of one."""
    if isinstance(prompts, str):
        return [prompts]
    found: Any = prompts.tolist() if hasattr(prompts, "tolist") else prompts
    if not isinstance(found, Sequence) or isinstance(found, bytes | bytearray):
        raise InvalidParamsError("prompts", prompts, "a text, token ids, or a list of them")
    if len(found) and all(isinstance(one, Integral) for one in found):
        return [found]
    return list(found)


def _params_for(
    prompts: Sequence[object], params: SamplingParams | Sequence[SamplingParams] | None
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * len(prompts)
    if not isinstance(params, list | tuple):
        raise InvalidParamsError("params", params, "SamplingParams, or a list of them")
    if len(params) != len(prompts):
        raise InvalidParamsError(
            "params", f"{len(params)} of them", f"one, or as many as the {len(prompts)} prompts"
        )
    return list(params)


def _refusal(prompt: object, error: RequestError) -> RequestOutput:
    text = prompt if isinstance(prompt, str) else None
    return RequestOutput(
        request_id=-1,
        prompt=text,
        prompt_token_ids=(),
        completions=(Completion("", (), FinishReason.ERROR),),
        metrics=RequestMetrics(0.0, None, 0.0, None),
        cache=CacheReport(0, 0, 0),
        error=error,
    )


def _load_tokenizer(path: Path) -> Tokenizer | None:
    if not (path / "tokenizer.json").is_file():
        return None  # token ids in, token ids out
    return Tokenizer.load(path)


def _fingerprint(path: Path) -> str:
    """What tells these weights from others: names, sizes and times of the checkpoint's files."""
    digest = hashlib.blake2b(digest_size=16)
    for file in [*sorted(path.glob("*.safetensors")), path / "config.json"]:
        try:
            facts = file.stat()
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from error
        digest.update(f"{file.resolve()} {facts.st_size} {facts.st_mtime_ns}\n".encode())
    return digest.hexdigest()
