"""An engine over a fake device, checked after every step, and its expected answers."""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import Any

from ramify.config import EngineConfig, resolve
from ramify.engine.core import EngineCore
from ramify.engine.request import DetokenizerFactory
from ramify.engine.speculation.drafter import Drafter
from ramify.engine.tier_parts import TierParts
from ramify.outputs import FinishReason, RequestOutput, StepOutput
from ramify.params import SamplingParams
from ramify.testing import FakeExecutor, fake_next_token

VOCAB, EOS = 50, 0


class LetterDecoder:
    """Token t is letter number t; an odd token is held back until the next token."""

    def __init__(self, keep: bool | Sequence[str] = False) -> None:
        assert not keep
        self.held = ""

    def step(self, token_id: int) -> str:
        text = self.held + chr(ord("A") + token_id)
        self.held = text if token_id % 2 else ""
        return "" if token_id % 2 else text

    def finish(self) -> str:
        return self.held


@dataclass
class Bench:
    """An engine over a fake device, checked after every step."""

    pool_tokens: int = 4096
    page_size: int = 4
    max_num_seqs: int = 64
    max_batch_tokens: int = 512
    max_model_len: int = 2048
    prefix_cache: bool = True
    window: int | None = None
    fail_at: Container[int] = ()
    error: BaseException | None = None
    next_token: Callable[[Sequence[int]], int] | None = None
    drafter: Drafter | None = None
    options: dict[str, Any] = field(default_factory=dict)  # of the scheduler, others than above
    speculative: str = "off"
    max_draft_tokens: int = 15
    check_sample: float = 0.0
    text_decoder: DetokenizerFactory = LetterDecoder
    tiers: Callable[[FakeExecutor], TierParts] | None = None
    step_s: float = 1.0  # of the bench's clock
    tokens: dict[int, list[int]] = field(default_factory=dict)
    answers: dict[int, dict[int, list[int]]] = field(default_factory=dict)
    texts: dict[tuple[int, int], str] = field(default_factory=dict)
    outputs: dict[int, RequestOutput] = field(default_factory=dict)

    def __post_init__(self) -> None:
        engine_config = EngineConfig.of(
            kv_cache_tokens=self.pool_tokens,
            page_size=self.page_size,
            max_num_seqs=self.max_num_seqs,
            max_batch_tokens=self.max_batch_tokens,
            prefix_cache=self.prefix_cache,
            **self.options,
            speculative=self.speculative,
            max_draft_tokens=self.max_draft_tokens,
            check_sample=self.check_sample,
        )
        config = resolve(
            engine_config,
            model_max_len=self.max_model_len,
            token_bytes=1,
            free_memory=0,
            window=self.window,
        )
        self.device = FakeExecutor(
            config.num_pages,
            self.page_size,
            vocab_size=VOCAB,
            next_token=self.next_token,
            fail_at=self.fail_at,
            error=self.error,
            window=self.window,
        )
        self.time = 0.0
        self.core = EngineCore(
            config,
            self.device,
            vocab_size=VOCAB,
            eos_token_ids=[EOS],
            detokenizer_factory=self.text_decoder,
            drafter=self.drafter,
            clock=lambda: self.time,
            tiers=None if self.tiers is None else self.tiers(self.device),
        )

    def add(
        self,
        prompt: Sequence[int],
        *,
        priority: int = 0,
        tenant: str = "",
        session: str = "",
        **params: Any,
    ) -> int:
        request_id = self.core.add_request(
            prompt, SamplingParams(**params), priority=priority, tenant=tenant, session=session
        )
        self.tokens[request_id] = []
        return request_id

    def step(self) -> list[StepOutput]:
        """Run one step; asserts that each event belongs to a live request."""
        self.time += self.step_s
        events = self.core.step()
        for event in events:
            assert event.request_id not in self.outputs
            answers = self.answers.setdefault(event.request_id, {})
            answers.setdefault(event.index, []).extend(event.new_token_ids)
            self.texts[event.request_id, event.index] = (
                self.texts.get((event.request_id, event.index), "") + event.text
            )
            if event.index == 0:
                self.tokens[event.request_id] += event.new_token_ids
            if event.output is not None:
                self.end(event.output)
        self.check()
        return events

    def end(self, output: RequestOutput) -> None:
        assert output.request_id not in self.outputs
        self.outputs[output.request_id] = output
        assert list(output.token_ids) == self.tokens[output.request_id]
        for index, completion in enumerate(output.completions):
            token_ids = self.answers.get(output.request_id, {}).get(index, [])
            assert list(completion.token_ids) == token_ids
            text = self.texts.get((output.request_id, index), "")
            if completion.finish_reason is FinishReason.ABORT:
                assert completion.text.startswith(text)  # `output` tells the rest
            else:
                assert completion.text == text
        report = output.cache
        if output.metrics.ttft_s is not None:
            assert report.prompt_tokens == len(output.prompt_token_ids)

    def abort(self, request_id: int) -> None:
        self.end(self.core.abort(request_id))
        self.check()

    def check(self) -> None:
        """Check the cache, the block table's row count, and that no row holds a free page."""
        self.core.cache.check()
        running = self.core.scheduler.running
        rows = [request.sequence.row for request in running]
        assert None not in rows
        assert len(set(rows)) == len(rows) <= self.max_num_seqs
        assert self.core.table.num_free_rows == self.max_num_seqs - len(rows)
        for row in rows:
            assert row is not None
            assert not any(self.core.cache.is_free(page) for page in self.core.table.pages(row))

    def run(self) -> dict[int, RequestOutput]:
        """Until nothing is left; then nothing may be held but what is warm, and can be evicted."""
        steps = 0
        while self.core.has_unfinished:
            self.step()
            steps += 1
            assert steps < 100_000, "the engine makes no progress"
        assert self.outputs.keys() == self.tokens.keys()
        stats = self.core.cache.stats()
        assert (stats.num_leases, stats.private_pages) == (0, 0)
        assert stats.evictable_pages == stats.cached_pages
        assert not self.core.live
        return self.outputs

    def assert_nothing_leaked(self) -> None:
        assert self.run() == self.outputs
        self.core.cache.clear()
        assert self.core.cache.stats().free_pages == self.core.cache.num_pages
        self.core.cache.check()


def expected(prompt: Sequence[int], max_tokens: int, *, ends: Container[int] = (EOS,)) -> list[int]:
    """Return the answer of an engine without a cache."""
    context = list(prompt)
    while len(context) < len(prompt) + max_tokens:
        context.append(fake_next_token(context, VOCAB))
        if context[-1] in ends:
            break
    return context[len(prompt) :]
