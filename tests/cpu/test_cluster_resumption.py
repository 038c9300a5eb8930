"""An answer whose connection ends after any of its tokens: another engine goes on, with equal bits."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

pytest.importorskip("grpc", reason="grpcio is not installed (pip install ramify[cluster])")
pytest.importorskip("llguidance", reason="llguidance is not installed")

from ramify.cluster import wire
from ramify.cluster.client import ClusterLLM
from ramify.cluster.replica import Replica
from ramify.engine.async_llm import AsyncLLM
from ramify.outputs import Completion, TokenLogprob
from ramify.params import SamplingParams
from tests.cpu.test_resumption_bits import CASES, PROMPT

MAX_TOKENS = 16
NAMES = {
    "off": ("greedy", "sampled", "penalties", "schema", "calls", "n=2", "n=2, schema"),
    "auto": ("greedy", "sampled", "schema", "n=2"),
}


@dataclass
class Cut:
    """Ends the connection that has sent `num_left` tokens; None: none."""

    num_left: int | None = None

    @property
    def is_done(self) -> bool:
        """Whether it has ended a connection."""
        return self.num_left is None

    def shorten(self, step: wire.Step) -> wire.Step | None:
        """The part of a step that is still sent; None: all of it."""
        for number, output in enumerate(step.outputs, 1):
            if self.num_left is None:
                break
            self.num_left -= len(output.token_ids)
            if self.num_left <= 0:
                self.num_left = None
                return msgspec.structs.replace(step, outputs=step.outputs[:number])
        return None


class CutReplica(Replica):
    """Ends a connection behind a token, as the death of its process does."""

    cut: Cut

    async def _serve_peer(
        self, requests: Any, write: Callable[[bytes], Awaitable[None]], peer: str
    ) -> str | None:
        async def cut_write(body: bytes) -> None:
            message = wire.decode_from_replica(body)
            part = self.cut.shorten(message) if isinstance(message, wire.Step) else None
            await write(body if part is None else wire.encode(part))
            if part is not None:
                raise ConnectionResetError

        return await super()._serve_peer(requests, cut_write, peer)


@dataclass
class Received:
    """What the reader of a request got, by answer."""

    token_ids: dict[int, list[int]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)
    num_ends: dict[int, int] = field(default_factory=dict)
    completions: tuple[Completion, ...] = ()
    num_tokens: int = 0  # of the usage


async def receive(llm: ClusterLLM, params: SamplingParams) -> Received:
    """Send a request, and read it to its end."""
    received = Received()
    async for event in llm.stream(PROMPT, params):
        index = event.index
        received.token_ids.setdefault(index, []).extend(event.new_token_ids)
        received.texts[index] = received.texts.get(index, "") + event.text
        received.logprobs.setdefault(index, []).extend(event.logprobs)
        ends = received.num_ends.get(index, 0) + (event.finish_reason is not None)
        received.num_ends[index] = ends
        if event.output is not None:
            assert event.output.error is None
            assert not event.output.resumed, "both engines are exact and have one identity"
            received.completions = event.output.completions
            received.num_tokens = event.output.usage.completion_tokens
    return received


async def count_resumptions(llm: ClusterLLM, cut: Cut, params: SamplingParams) -> tuple[int, int]:
    """Cut behind each token: the reader gets each token, each text and each end once.

    Returns:
        how many answers went on elsewhere, and how many could.
    """
    begin = llm.dispatch.num_resumptions
    whole = await receive(llm, params)
    assert whole.num_tokens > 2
    assert set(whole.num_ends.values()) == {1}
    for num_tokens in range(1, whole.num_tokens):
        cut.num_left = num_tokens
        if num_tokens % 2:
            await llm.cache.clear()  # a prompt that is cached and one that is not

        received = await receive(llm, params)

        assert received == whole, num_tokens
        assert cut.is_done
        # An answer whose end came before the cut does not wait for the connection's end.
        await asyncio.sleep(0.05)
        await until_ready(llm)
    return llm.dispatch.num_resumptions - begin, whole.num_tokens - 1


async def until_ready(llm: ClusterLLM) -> None:
    async with asyncio.timeout(10.0):
        await llm.all_ready(10.0)


@pytest.mark.parametrize("speculative", ["off", "auto"])
def test_another_engine_goes_on_after_each_token(speculative: str) -> None:
    """Greedy, sampled, penalties, a JSON schema, calls, several answers, a stop string; with drafts too."""

    async def main() -> None:
        engines = [
            AsyncLLM(kv_cache_tokens=4096, page_size=4, speculative=speculative) for _ in range(2)
        ]
        cut, replicas = Cut(), [CutReplica(engine) for engine in engines]
        for replica in replicas:
            replica.cut = cut
        ports = [await replica.start() for replica in replicas]
        addresses = {str(number): f"127.0.0.1:{port}" for number, port in enumerate(ports)}
        llm = ClusterLLM(addresses, engines[0].tokenizer)
        await llm.start(10.0)
        await until_ready(llm)
        try:
            cases = [CASES[name] | {"ignore_eos": True} for name in NAMES[speculative]]
            text = (await receive(llm, SamplingParams(max_tokens=24))).completions[0].text
            cases.append({"stop": ("never", text[9:18])})
            for case in cases:
                params = SamplingParams(max_tokens=MAX_TOKENS, logprobs=1, **case)
                resumed, possible = await count_resumptions(llm, cut, params)
                # An increment with drafts may have the end of an answer.
                assert resumed == possible if speculative == "off" else 0 < resumed <= possible
        finally:
            await llm.aclose()
            for replica in replicas:
                await replica.close()

    asyncio.run(main())
