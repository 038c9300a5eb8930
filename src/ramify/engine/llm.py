"""`LLM`: a checkpoint, its cache and its engine behind one object."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from ramify.config import (
    AttentionSection,
    CacheSection,
    EngineConfig,
    ModelSection,
    ResolvedConfig,
)
from ramify.engine.cache_admin.view import CacheView
from ramify.engine.cache_admin.warmup import WARM_PARAMS, WarmPrompt
from ramify.engine.call_turns import loop_call, whole_call
from ramify.engine.context import EngineStats
from ramify.engine.core import EngineCore
from ramify.engine.description import summary
from ramify.engine.embedding import embedding_of, embedding_params
from ramify.engine.hit_verifier import HitVerifier
from ramify.engine.offline import CLOSED, BatchOptions, OfflineDriver
from ramify.engine.request_options import RequestOptions
from ramify.engine.sessions.session import Session, SessionOptions, open_transcript
from ramify.engine.text.prompt_inputs import Message, Prompt, as_prompt_list, chat_prompts
from ramify.engine.weight_reload import swap_weights, validate_running_mode
from ramify.errors import ConfigError, EngineStoppedError
from ramify.outputs import RequestOutput, StepOutput
from ramify.params import SamplingParams
from ramify.scheduler_options import SchedulerSection

if TYPE_CHECKING:  # what needs tensors is loaded with the model
    from ramify.engine.execution.assembly import LocalEngine
    from ramify.engine.text.tokenizer import Tokenizer

_MODEL, _CACHE = ModelSection(), CacheSection()
_SCHEDULER, _ATTENTION = SchedulerSection(), AttentionSection()
T = TypeVar("T")


class LLM:
    """Answers prompts with a Hugging Face checkpoint; computes each shared prefix once.

    Args:
        model: a checkpoint directory, the id of a hub model, or "ramify-tiny".
        dtype: "auto", "float32" or "bfloat16", or the torch dtype.
        progress: bars on stderr while weights load, if it is a terminal.
        others: further options of `ramify.config`, which has all defaults and their reasons.

    Calls from several threads wait for each other, in the order in which they came: `generate`,
    `chat`, sessions, `cache`, `reload_weights`, `verify_hits`, `stats`, `run`. A loop of `add_request`
    and `step` belongs to one thread: such a call while another thread is in one raises
    ConcurrentCallError. `AsyncLLM` computes the requests of all callers together.

    Raises:
        ConfigError: an option is unknown or has an impossible value.
        ModelError: the checkpoint is missing, damaged or of an unsupported architecture.
    """

    def __init__(
        self,
        model: str | Path = _MODEL.model,
        *,
        dtype: object = _MODEL.dtype,
        max_model_len: int | None = _MODEL.max_model_len,
        page_size: int = _CACHE.page_size,
        kv_cache_tokens: int | None = _CACHE.kv_cache_tokens,
        kv_cache_memory: int | str | None = _CACHE.kv_cache_memory,
        prefix_cache: bool = _CACHE.prefix_cache,
        max_num_seqs: int = _SCHEDULER.max_num_seqs,
        max_batch_tokens: int = _SCHEDULER.max_batch_tokens,
        attention_backend: str = _ATTENTION.attention_backend,
        exact: bool = _ATTENTION.exact,
        progress: bool = False,
        **others: Any,
    ) -> None:
        config = EngineConfig.of(
            model=model,
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
        from ramify.engine.execution.assembly import LocalEngine

        self._engine: LocalEngine | None = LocalEngine(config, progress=progress)
        self._attach_core(self._engine.core, self._engine.tokenizer)

    @classmethod
    def from_core(cls, core: EngineCore, tokenizer: Tokenizer | None = None) -> LLM:
        """An `LLM` over an engine of your own; it has no `engine`, so no checkpoint."""
        llm = cls.__new__(cls)
        llm._engine = None  # noqa: SLF001 - its own class
        llm._attach_core(core, tokenizer)  # noqa: SLF001
        return llm

    def _attach_core(self, core: EngineCore, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        self.turns = core.turns
        self.config: ResolvedConfig = core.config
        self._open_driver: OfflineDriver | None = OfflineDriver(core)

    @whole_call
    def close(self) -> None:
        """Abort live requests, free weights and K/V; later calls raise EngineStoppedError.

        May be called twice. `with LLM(...) as llm` closes at the end of the block.
        """
        if self._open_driver is not None:
            self._open_driver.close()
            if self._engine is not None:
                self._engine.close()
            self._open_driver = self._engine = None

    def __repr__(self) -> str:
        if self._open_driver is None:
            return f"<{type(self).__name__}: closed>"
        description = None if self._engine is None else self._engine.description
        return f"<{type(self).__name__}: {summary(self.config, description)}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- engine and cache --------------------------------------------------------------------

    @property
    def _driver(self) -> OfflineDriver:
        if self._open_driver is None:
            raise EngineStoppedError(CLOSED)
        return self._open_driver

    @property
    def core(self) -> EngineCore:
        """The engine, for what `LLM` has no call for; see `run`."""
        return self._driver.core

    def get_tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer: `encode`, `decode`, `apply_chat_template`, `encode_chat`.

        Raises:
            ConfigError: the checkpoint has none; prompts are token ids.
        """
        if self.tokenizer is None:
            raise ConfigError("the checkpoint has no tokenizer; give prompts as token ids")
        return self.tokenizer

    @property
    def engine(self) -> LocalEngine:
        """The engine built from the checkpoint: model, runner, backend, exactness.

        Raises:
            ConfigError: this `LLM` was made by `from_core`.
        """
        if self._open_driver is None:
            raise EngineStoppedError(CLOSED)
        if self._engine is None:
            raise ConfigError("this LLM was made by from_core, over an engine without a model")
        return self._engine

    @property
    def cache(self) -> CacheView:
        """Calls on the cache: `stats`, `tree`, `explain`, `pin`, `warm`, `share`, `clear`."""
        return CacheView(self.core, self.tokenizer, self._warm)

    def _warm(self, prompts: Sequence[WarmPrompt]) -> Sequence[RequestOutput | Exception]:
        requests = [prompt.options() for prompt in prompts]
        return self._driver.run(
            [partial(prompt.ids, self.tokenizer) for prompt in prompts],
            BatchOptions([WARM_PARAMS] * len(prompts), requests),
            None,
        )

    def reload_weights(
        self,
        model: str | Path,
        *,
        running: Literal["finish", "restart"] = "finish",
        progress: bool = False,
    ) -> None:
        """Replace the weights by others of the same model; the cache needs no flush.

        Old and new weights are in memory together until the new ones are installed. Other threads'
        calls go on while they load.

        Args:
            model: a checkpoint directory or hub id of the same architecture, sizes and
                vocabulary. The tokenizer and chat template stay.
            running: live requests "finish" with the old weights first, or "restart": they keep
                their tokens so far, and go on with the new weights.
            progress: bars on stderr while weights load, if it is a terminal.

        Raises:
            ModelError, ConfigError: see `LocalEngine.load_weights`; nothing has changed.
        """
        validate_running_mode(running)
        swap = self.engine.load_weights(model, progress=progress)
        self._install_weights(swap, finish_first=running == "finish")

    @whole_call
    def _install_weights(self, swap: Callable[[], bytes], *, finish_first: bool) -> None:
        while finish_first and self.core.has_unfinished:
            self._driver.step_unread()
        swap_weights(self.core, swap)

    @whole_call
    def stats(self) -> EngineStats:
        """Running and waiting requests, work done so far, and `PrefixCache.stats()`."""
        return self.core.stats()

    @whole_call
    def run(self, call: Callable[[EngineCore], T]) -> T:
        """Return `call(core)`, like `AsyncLLM.run`."""
        return call(self.core)

    @property
    def hit_verifier(self) -> HitVerifier:
        """Results of computing sampled cache hits again; see `verify_sample` and `verify_hits`."""
        return self.core.hit_verifier

    @whole_call
    def verify_hits(self) -> HitVerifier:
        """Compute the recorded cache hits again, cold, and compare; does nothing while busy."""
        while self.core.verify_next_hit():
            while self.core.has_unfinished:
                self.core.step()
        return self.core.hit_verifier

    # -- whole answers -----------------------------------------------------------------------

    @whole_call
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
            params: one for all prompts, or a list with one for each, like the next three; None is
                `SamplingParams()`.
            priority: larger ones first.
            tenant: owner of the prompt; tenants share nothing but public prefixes.
            salt: prompts share prefixes only with prompts of the same salt.
            progress: a bar on stderr; None: for two prompts or more, if stderr is a terminal.
            on_finished: called with each output as it ends.

        A prompt that cannot be served, alone or in a list, gets an output whose `error` says why; the
        others go on, and a warning is logged. An interrupt, or an error in `on_finished`, aborts the
        requests of this call; the `LLM` stays usable.

        Raises:
            InvalidParamsError: a list of options is not as long as the list of prompts.
        """
        driver, batch = self._driver, as_prompt_list(prompts)
        options = BatchOptions.of(
            len(batch),
            params,
            progress=progress,
            on_finished=on_finished,
            priority=priority,
            tenant=tenant,
            salt=salt,
        )
        return driver.run(batch, options, self.tokenizer)

    @whole_call
    def chat(
        self,
        /,
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
        """Answer one conversation, or a list of conversations, through the model's chat template.

        Args:
            template_options: `tools`, and further variables of the template; the other arguments
                are those of `generate`.

        Raises:
            InvalidParamsError: as `generate`; also for what is no list of messages, or has no tokenizer.

        Messages that the chat template refuses are a prompt that cannot be served.
        """
        batch, driver = chat_prompts(messages, self.tokenizer, template_options), self._driver
        options = BatchOptions.of(
            len(batch),
            params,
            progress=progress,
            on_finished=on_finished,
            priority=priority,
            tenant=tenant,
            salt=salt,
        )
        return driver.run(batch, options, None)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        prompt_name: str | None = None,
        tenant: str | Sequence[str] = "",
        salt: str | Sequence[str] = "",
        progress: bool | None = None,
    ) -> NDArray[np.float32]:
        """Vectors of prompts: hidden states after the final norm, pooled.

        Embedding checkpoints that are decoders, such as Qwen3-Embedding, are made for it; their
        files of sentence-transformers say how to pool (last token, mean or first token) and whether
        to scale vectors to length 1. Other models' vectors are those of the last token with length
        1, and say less. Prefixes come from the cache where the last token is enough.

        Args:
            prompt_name: the checkpoint's prompt (`config_sentence_transformers.json`) to put before
                each text; None: its default, if it has one. Token ids stay as they are.

        Returns:
            [number of prompts, hidden_size] float32.

        Raises:
            RequestError: a prompt cannot be served; the error of the first.
            UnsupportedModelError: the checkpoint's vectors are computed in a way that is not known.
        """
        pooling = self.engine.pooling
        pooling.check()
        prefix = pooling.prompt_text(prompt_name)
        texts = [
            prefix + prompt if isinstance(prompt, str) and prompt else prompt
            for prompt in as_prompt_list(prompts)
        ]
        params = embedding_params(pooling.mode)
        outputs = self.generate(texts, params, tenant=tenant, salt=salt, progress=progress)
        if not outputs:
            return np.empty((0, self.engine.model_config.hidden_size), np.float32)
        return np.stack(
            [embedding_of(output, is_normalised=pooling.is_normalised) for output in outputs]
        )

    def session(
        self,
        begin: Prompt = "",
        *,
        messages: Sequence[Message] | None = None,
        system: str | None = None,
        priority: int = 0,
        tenant: str = "",
        salt: str = "",
        pin: bool = False,
        ttl_s: float | None = None,
        **template_options: Any,
    ) -> Session:
        """A prompt that grows turn by turn, branches and goes back: see `Session`.

        Args:
            begin: the text or token ids that a plain session begins with.
            messages, system: for a conversation: its first messages ([] for none), and the text of
                a system message before them.
            priority, tenant, salt: of every turn, as in `generate`.
            pin: keep the newest turn from eviction, if the budget for pins allows.
            ttl_s: seconds without a hit after which a pin expires; None: until `close`.
            template_options: `tools`, and further variables of the template.

        Raises:
            RequestError: the beginning cannot be tokenised, or there is no chat template.
        """
        transcript = open_transcript(self.tokenizer, begin, messages, system, template_options)
        options = RequestOptions(priority=priority, tenant=tenant, salt=salt)
        return Session(self, transcript, SessionOptions(options, pin, ttl_s))

    def _answer(
        self, prompt: Prompt, params: SamplingParams, options: RequestOptions
    ) -> RequestOutput:
        """The answer to one prompt, for a `Session`, whose call this is a part of."""
        [output] = self._driver.run(
            [prompt], BatchOptions([params], [options], progress=False), self.tokenizer
        )
        return output

    # -- step by step ------------------------------------------------------------------------

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        tenant: str = "",
        salt: str = "",
    ) -> Iterator[StepOutput]:
        """Yield the increments of an answer as they are generated; the last one has `output`.

        Each increment is one step, between which other calls may run. Leaving the iterator aborts the
        request before the next step of any call.

        Raises, at the first increment:
            RequestError: the prompt can never be served.
        """
        options = RequestOptions(priority=priority, tenant=tenant, salt=salt)
        return self._driver.stream(prompt, params or SamplingParams(), self.tokenizer, options)

    @loop_call
    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        tenant: str = "",
        salt: str = "",
        max_shared: int | None = None,
    ) -> int:
        """Queue one prompt; returns its id. Options as those of `generate`.

        Args:
            max_shared: share only this many of the first tokens with other requests; None: all.

        Raises:
            RequestError: the prompt can never be served; nothing is queued.
        """
        options = RequestOptions(priority=priority, tenant=tenant, salt=salt, max_shared=max_shared)
        return self._driver.add(prompt, params or SamplingParams(), self.tokenizer, options)

    @loop_call
    def step(self) -> list[StepOutput]:
        """Run one step of the engine; returns the new tokens of each request that got any.

        A `StepOutput` unpacks to (request id, new token ids, finished). It also has the index of
        the completion, text, log probabilities and finish reason. The last one of a request has
        its `output`.

        Raises:
            OutOfPagesError: pins, or leases outside the engine, hold pages that the next request
                needs; nothing changed. Release them, or abort the request.
        """
        return self._driver.step()

    def has_unfinished(self) -> bool:
        """Whether `step` has anything to compute or to return."""
        return self._driver.has_unfinished

    @loop_call
    def take_output(self, request_id: int) -> RequestOutput:
        """The output of a request that ended under `step` or `abort`; can be taken once.

        Raises:
            UnknownRequestError: it has not ended, was taken before, or is too old to be kept.
        """
        return self._driver.take_output(request_id)

    @loop_call
    def abort(self, request_id: int) -> None:
        """Abort a live request; its output has the finish reason `abort`.

        Raises:
            UnknownRequestError: no live request has this id.
        """
        self._driver.abort(request_id)
