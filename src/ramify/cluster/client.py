"""`ClusterLLM`: replicas behind the interface of `AsyncLLM`; a server cannot tell them apart."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ramify.cluster.admin_calls import AdminCalls
from ramify.cluster.credentials import Credentials
from ramify.cluster.dispatch import Dispatch
from ramify.cluster.members import RETRY_AFTER_S
from ramify.cluster.prompt_hashes import PromptHashes
from ramify.cluster.remote_replica import RemoteReplica
from ramify.cluster.remote_request import RemoteRequest
from ramify.cluster.rollout import replace_weights_in_turn
from ramify.cluster.routes import CacheRoutes, Routes
from ramify.cluster.view import ClusterView
from ramify.cluster.warm_up import WarmUp
from ramify.cluster.wire import Welcome
from ramify.config import ResolvedConfig
from ramify.engine.cache_admin import calls
from ramify.engine.cache_admin.async_view import AsyncCacheView
from ramify.engine.cache_admin.warmup import PUBLIC, WARM_PARAMS, WARM_PRIORITY, WarmPrompt
from ramify.engine.context import EngineStats
from ramify.engine.description import EngineDescription
from ramify.engine.logits.grammar import GrammarCompiler
from ramify.engine.request_options import RequestOptions
from ramify.engine.scheduling.queue_limits import QueueLimits
from ramify.engine.scheduling.validation import validate_token_ids
from ramify.engine.serving.engine_thread import EngineState, Health
from ramify.engine.serving.streams import LoopDispatcher, OutputCollector, Stream
from ramify.engine.text.prompt_inputs import Prompt, encode
from ramify.engine.text.tokenizer import Tokenizer
from ramify.errors import (
    ConfigError,
    DrainingError,
    EngineStoppedError,
    InvalidParamsError,
    NoReplicaError,
    ReplicaLostError,
    RequestError,
)
from ramify.outputs import RequestOutput
from ramify.params import SamplingParams

LONG_TEXT = 8192  # characters; longer ones are tokenised in another thread
LONG_PROMPT = 16384  # tokens; longer ones are hashed in another thread: 25 ns a token
START_S = 120.0  # for the first replica to answer
WARM_AT_ONCE = 64  # prompts
READY_CHECK_S = 0.02


class ClusterLLM:
    """Sends each request to one of its replicas, and goes on elsewhere when that one dies.

    It is an `EngineClient`. Prompts become token ids here. Unseeded requests get their seed here, so
    that a second replica draws the tokens that the first would have drawn.

    Args:
        addresses: host and port of each replica, by name; `add` and `remove` change them.
        tokenizer: of the model; replicas with another one are refused.
        routes: chooses the replica of a request; by default by what each has cached and has to do.
        credentials: the same as those of the replicas.
        replaced: gets the name of each replica whose weights `reload_weights` has replaced, and the model.
        fixed_weights: refuse `reload_weights`, since whoever starts the replicas names their weights.
        link_options: `ping_s` and `dead_s` of `Link`.

    Use it in one event loop: `await start()`, and `await aclose()` at the end.
    """

    def __init__(
        self,
        addresses: Mapping[str, str],
        tokenizer: Tokenizer | None,
        *,
        routes: Routes | None = None,
        credentials: Credentials | None = None,
        replaced: Callable[[str, str], None] | None = None,
        fixed_weights: bool = False,
        **link_options: Any,
    ) -> None:
        self.tokenizer = tokenizer
        self.dispatch = Dispatch(
            addresses,
            CacheRoutes() if routes is None else routes,
            credentials or Credentials(),
            tokenizer_digest=None if tokenizer is None else tokenizer.digest,
            **link_options,
        )
        self._replaced, self._fixed_weights = replaced or _nothing, fixed_weights
        self._is_draining = self._is_closed = self._is_replacing = False
        self._hashes: PromptHashes | None = None
        self._admin_calls = AdminCalls(self.dispatch.members)
        self._warm_up = WarmUp(self.dispatch.routes, self._warm_one)
        self.dispatch.on_joined, self.dispatch.on_left = self._warm_up.begin, self._warm_up.end
        self._grammars: GrammarCompiler | None = None

    async def start(self, timeout_s: float = START_S) -> None:
        """Connect to the replicas; returns when one has joined.

        Raises:
            NoReplicaError: none has joined in time, or all are refused; says why.
        """
        try:
            await self.dispatch.start(timeout_s)
        except NoReplicaError:
            await self.aclose()
            raise
        welcome = self._welcome
        self._hashes = PromptHashes(welcome.config.page_size)
        if self.tokenizer is not None:
            self._grammars = GrammarCompiler(
                self.tokenizer.to_json,
                vocab_size=welcome.description.vocab_size,
                eos_token_ids=welcome.description.eos_token_ids,
            )

    async def all_ready(self, timeout_s: float = START_S) -> None:
        """Wait until every replica takes requests.

        Raises:
            NoReplicaError: one has not joined in time; says why.
        """
        deadline_s = time.monotonic() + timeout_s
        while not all(replica.is_ready for replica in self.dispatch.replicas.values()):
            if time.monotonic() > deadline_s:
                raise NoReplicaError(RETRY_AFTER_S, self.dispatch.members.why_not_ready())
            await asyncio.sleep(READY_CHECK_S)

    def move(self, name: str, address: str) -> None:
        """Another process has taken the place of a replica, at this address."""
        self.dispatch.replicas[name].move(address)

    def add(self, name: str, address: str, credentials: Credentials | None = None) -> None:
        """Use a further replica.

        Args:
            credentials: what it wants to be shown; None: those of the others.
        """
        self.dispatch.members.add(name, address, credentials)

    def remove(self, name: str) -> None:
        """Use a replica no more once its connection ends, as it does when the replica has drained."""
        self.dispatch.members.remove(name)

    @property
    def _welcome(self) -> Welcome:
        """What a replica said of itself; the others say the same, but for their weights for a time."""
        if self.dispatch.reference is None:
            raise NoReplicaError(RETRY_AFTER_S, "none has joined yet")
        return self.dispatch.reference

    # -- what a server reads -----------------------------------------------------------------

    @property
    def config(self) -> ResolvedConfig:
        """Sizes and options of one replica; all have the same."""
        return self._welcome.config

    @property
    def description(self) -> EngineDescription:
        """Model and implementation of one replica."""
        return self._welcome.description

    @property
    def replicas(self) -> ClusterView:
        """The replicas, each by itself."""
        return ClusterView(self.dispatch)

    @property
    def queue_limits(self) -> QueueLimits:
        """Sums over the replicas that are connected."""
        welcomes = [replica.welcome for replica in self.dispatch.replicas.values()]
        configs = [welcome.config for welcome in welcomes if welcome is not None]
        return QueueLimits.total([QueueLimits.of(config) for config in configs or [self.config]])

    def health(self) -> Health:
        """Ready while a replica is."""
        is_busy = self.dispatch.num_live > 0
        if self._is_closed:
            return Health(EngineState.STOPPED, is_busy, None, None)
        if self._is_draining:
            return Health(EngineState.DRAINING, is_busy, None, None)
        if not self.dispatch.members.has_ready:
            return Health(
                EngineState.UNREACHABLE, is_busy, None, self.dispatch.members.why_not_ready()
            )
        return Health(EngineState.READY, is_busy, None, None)

    async def stats(self) -> EngineStats:
        """Sums over the replicas."""
        stats: EngineStats = await self.run(calls.ReadStats())
        return stats

    def compile_grammar(self, params: SamplingParams, tenant: str = "") -> None:
        """See `EngineClient`; compiles here, as the replica does."""
        if params.structured is None:
            return
        if self._grammars is None:
            raise InvalidParamsError("structured", "given", "None: the model has no tokenizer")
        self._grammars.compile(params.structured, tenant)

    # -- answers -----------------------------------------------------------------------------

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        tenant: str = "",
        salt: str = "",
        session: str = "",
        max_shared: int | None = None,
        explain: bool = False,
        retention: Sequence[tuple[int, float | None]] = (),
        cache_share: float | None = None,
        pin_share: float | None = None,
    ) -> Stream:
        """The increments of an answer; see `AsyncLLM.stream`."""
        options = RequestOptions(
            priority=priority,
            tenant=tenant,
            salt=salt,
            session=session,
            max_shared=max_shared,
            explain=explain,
            retention=retention,
            cache_share=cache_share,
            pin_share=pin_share,
        )
        return self._stream_prompt(prompt, params, options)

    async def generate(self, prompt: Prompt, params: SamplingParams | None = None) -> RequestOutput:
        """A whole answer; see `AsyncLLM.generate`."""
        return await self.stream(prompt, params).whole()

    def _stream_prompt(
        self, prompt: Prompt, params: SamplingParams | None, options: RequestOptions
    ) -> Stream:
        """A stream of a text or token ids; for an `AsyncSession` too."""
        text = prompt if isinstance(prompt, str) else None
        in_thread = text is not None and len(text) > LONG_TEXT
        encode_prompt = partial(encode, prompt, self.tokenizer)
        return self._stream(encode_prompt, params, options, text=text, in_thread=in_thread)

    def _stream(
        self,
        encode_prompt: Callable[[], Sequence[int]],
        params: SamplingParams | None,
        options: RequestOptions,
        *,
        text: str | None = None,
        in_thread: bool,
        only: RemoteReplica | None = None,
    ) -> Stream:
        """A stream that encodes its prompt, in another thread if `in_thread`, and submits it.

        Args:
            only: the replica to compute it; None: the one that the routes choose.
        """
        chosen: Any = params or SamplingParams()

        async def submit(final_only: bool) -> OutputCollector:
            self._require_open()
            if not isinstance(chosen, SamplingParams):
                raise InvalidParamsError("params", chosen, "SamplingParams")
            ids = await asyncio.to_thread(encode_prompt) if in_thread else encode_prompt()
            tokens = validate_token_ids(ids, self.description.vocab_size)
            if chosen.structured is not None:
                await asyncio.to_thread(self.compile_grammar, chosen, options.tenant)
            page_hashes = await self._page_hashes(tokens, options)
            self._require_open()  # it may have been closed meanwhile
            request = RemoteRequest(
                self.dispatch.next_id(),
                OutputCollector(LoopDispatcher(asyncio.get_running_loop()), final_only=final_only),
                tokens,
                chosen.seeded(),
                options.checked(),
                prompt=text,
                page_hashes=page_hashes,
                now_s=time.monotonic(),
            )
            self.dispatch.submit(request, only=only)
            return request.collector

        return Stream(submit, self.dispatch.abandon)

    def _require_open(self) -> None:
        if self._is_closed:
            raise EngineStoppedError("the cluster's client was closed; make another one")
        if self._is_draining:
            raise DrainingError(1.0)

    async def _page_hashes(self, ids: array[int], options: RequestOptions) -> Sequence[bytes]:
        """Hashes of a prompt's whole pages, packed, in each namespace that replicas have."""
        assert self._hashes is not None, "start comes first"
        bases = self.dispatch.members.namespaces()
        make = partial(self._hashes.of, bases, ids, options.tenant, options.salt)
        return await asyncio.to_thread(make) if len(ids) > LONG_PROMPT else make()

    async def abort(self, request_id: int) -> None:
        """See `EngineClient`."""
        self.dispatch.abort(request_id)

    # -- the caches --------------------------------------------------------------------------

    @property
    def cache(self) -> AsyncCacheView:
        """The caches of all replicas."""
        return AsyncCacheView(
            self,
            self.tokenizer,
            self._warm,
            vocab_size=self.description.vocab_size,
            page_size=self.config.page_size,
        )

    async def run(self, call: Any) -> Any:
        """Run a call of `cache_admin.calls` on every replica; see `AdminCalls.run`."""
        # Whether or not a replica is there to run it; pins of warm prompts are their tenant's.
        if isinstance(call, calls.UnpinPrefix) and call.owner in (PUBLIC, call.tenant):
            self._warm_up.forget_pinned(call.owner, call.token_ids, call.salt)
        result = await self._admin_calls.run(call)
        if isinstance(call, calls.PinPublicPrefixes) and self._hashes is not None:
            for ids in call.prefixes:
                self._hashes.declare_public(array("i", ids))
            self._warm_up.declare_public(call.prefixes)
        return result

    async def _warm(self, prompts: Sequence[WarmPrompt]) -> list[RequestOutput | Exception]:
        """Compute prompts on every replica, and on those that join later; the results are the first's."""
        permits = asyncio.Semaphore(WARM_AT_ONCE)

        async def compute(prompt: WarmPrompt, replica: RemoteReplica) -> RequestOutput | Exception:
            async with permits:
                return await self._warm_one(prompt, replica)

        self._warm_up.remember(prompts)
        replicas = [replica for replica in self.dispatch.replicas.values() if replica.is_ready]
        if not replicas:
            raise NoReplicaError(RETRY_AFTER_S, self.dispatch.members.why_not_ready())
        outputs = await asyncio.gather(
            *(compute(prompt, replica) for replica in replicas for prompt in prompts)
        )
        return outputs[: len(prompts)]

    async def _warm_one(
        self, prompt: WarmPrompt, replica: RemoteReplica
    ) -> RequestOutput | Exception:
        """Compute a prompt on a replica."""
        ids = partial(prompt.ids, self.tokenizer)
        options = prompt.options(WARM_PRIORITY)
        try:
            stream = self._stream(ids, WARM_PARAMS, options, in_thread=True, only=replica)
            return await stream.whole()
        except (RequestError, NoReplicaError, ReplicaLostError) as error:
            return error

    # -- other weights -----------------------------------------------------------------------

    async def reload_weights(self, model: str | Path) -> None:
        """Replace the weights of all replicas, one at a time, while the others take the requests.

        Every answer is computed with the weights that it began with.

        Args:
            model: a checkpoint of the same architecture, sizes and vocabulary, as the replicas'
                machines name it.

        Raises:
            ConfigError: another call replaces them already, or `fixed_weights`.
            RolloutError: one failed after others had replaced theirs.
            NoReplicaError: none is connected.
            ModelError, ConfigError, ReplicaLostError: the first failed; nothing has changed.
        """
        if self._fixed_weights:
            raise ConfigError(
                f"model={str(model)!r}: engines that are started later load the model of the deployment's "
                "file; change it there and deploy again"
            )
        if self._is_replacing:
            raise ConfigError(f"the weights are being replaced; send {str(model)!r} after that")
        if not self.dispatch.members.has_ready:
            raise NoReplicaError(RETRY_AFTER_S, self.dispatch.members.why_not_ready())
        self._is_replacing = True
        try:
            replicas = self.dispatch.replicas.values()
            await replace_weights_in_turn(replicas, str(model), self._replaced)
        finally:
            self._is_replacing = False

    # -- the end -----------------------------------------------------------------------------

    async def drain(self, timeout_s: float | None = None) -> bool:
        """Take no new requests, let the live ones finish, then close; the replicas live on.

        Returns:
            whether all requests have finished.
        """
        self._is_draining = True
        has_finished = await self.dispatch.wait_until_idle(timeout_s)
        await self.aclose()
        return has_finished

    async def aclose(self) -> None:
        """Close the connections; live requests are aborted. The replicas live on."""
        self._is_closed = True
        await self._warm_up.close()
        await self.dispatch.close()


def _nothing(name: str, model: str) -> None:
    """Nobody wants to know whose weights were replaced."""
