"""Engine soak test: random requests and random faults around a tiny model.

Every answer is compared with that of the same request alone, cold, on a fresh engine. The faults:
steps that raise before or after they write, run out of memory or are interrupted; K/V that becomes
NaN, also in cached pages; page copies, detokenizers and eviction observers that raise.
"""

from __future__ import annotations

import random
import sys
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ramify.attention.backends.cpu import CpuBackend
from ramify.config import EngineConfig, resolve
from ramify.engine.core import EngineCore
from ramify.engine.execution.runner import ModelRunner
from ramify.engine.request import Request
from ramify.engine.speculation.drafter import accepts_drafts, max_drafts
from ramify.engine.step import OverlappingExecutor
from ramify.engine.text.detokenizer import Detokenizer
from ramify.engine.text.tokenizer import Tokenizer
from ramify.errors import StepFailedError, UnknownRequestError
from ramify.kv.pool import KVPool
from ramify.models.decoders.decoder import Decoder
from ramify.models.kv_cache_spec import attention_spec, build_attention, kv_layout, resolve_kv_dtype
from ramify.models.loader import load_model
from ramify.outputs import Completion, FinishReason, RequestOutput
from ramify.params import SamplingParams
from ramify.testing import write_tiny_checkpoint
from tests.cpu.saboteurs import OverlappingSaboteur, Saboteur
from tests.device_runner import chosen_runner, step_executor

MAX_TOKENS = 160  # of a request, prompt and answers
TINY: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 280,
}


@dataclass(frozen=True, slots=True)
class Cell:
    """Engine options that differ between runs."""

    name: str
    page_size: int = 4
    pool_tokens: int = 2048
    max_batch_tokens: int = 64
    max_num_seqs: int = 8
    kv_dtype: str = "auto"
    policy: str = "auto"
    prefix_cache: bool = True
    faults: float = 0.0  # how often a step has one
    share_right: float = 0.0  # of the guesses of a drafter; 0 for none


CELLS = {
    cell.name: cell
    for cell in (
        Cell("roomy"),
        Cell("roomy-faults", faults=0.06),
        Cell("tight-page1", page_size=1, pool_tokens=192, max_num_seqs=6, faults=0.05),
        Cell("tight-page16", page_size=16, pool_tokens=320, policy="lru", faults=0.05),
        Cell("tight-drafts", pool_tokens=256, faults=0.05, share_right=0.6),
        Cell("chunks", max_batch_tokens=7, faults=0.04),
        Cell("chunk1", page_size=3, max_batch_tokens=1, pool_tokens=600, faults=0.01),
        Cell("drafts", share_right=0.7),
        Cell("int8", page_size=8, kv_dtype="int8", faults=0.05, share_right=0.3),
        Cell("no-cache", prefix_cache=False, faults=0.04),
        Cell(
            "wide", page_size=5, max_batch_tokens=512, max_num_seqs=32, policy="slru", faults=0.05
        ),
        Cell("two-rows", page_size=2, max_num_seqs=2, pool_tokens=400, policy="lfu", faults=0.05),
    )
}


@dataclass(frozen=True, slots=True)
class Prompts:
    """A grammar of prompts: few stems, each with few continuations, each with few ends."""

    stems: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, rng: random.Random) -> Prompts:
        return cls(tuple(_tokens(rng, rng.choice([3, 9, 16, 33, 60])) for _ in range(6)))

    def draw(self, rng: random.Random) -> tuple[int, ...]:
        number = rng.randrange(len(self.stems))
        prompt = self.stems[number]
        if rng.random() < 0.8:
            prompt += _tokens(random.Random(f"{number}/{rng.randrange(2)}"), 11)
        if rng.random() < 0.7:
            prompt += _tokens(random.Random(f"end {rng.randrange(3)}"), 2)
        return prompt


def _tokens(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(3, 270) for _ in range(count))


PARAMS = (
    *(SamplingParams(max_tokens=count) for count in (1, 4, 9, 14)),
    SamplingParams(max_tokens=20, ignore_eos=True, logprobs=0),
    SamplingParams(max_tokens=12, stop=("a", "e", "in", "st")),
    SamplingParams(max_tokens=10, temperature=1.0, seed=5),
    SamplingParams(max_tokens=10, temperature=0.8, top_k=20, top_p=0.9, seed=6, logprobs=2),
    SamplingParams(max_tokens=8, temperature=1.0, seed=7, n=3),
    SamplingParams(max_tokens=6, n=2, ignore_eos=True),
    SamplingParams(max_tokens=10, frequency_penalty=0.7, presence_penalty=0.3),
    SamplingParams(max_tokens=10, temperature=1.0, seed=8, repetition_penalty=1.3, min_p=0.02),
    SamplingParams(max_tokens=5, prompt_logprobs=0),
)


class SmallModel:
    """A tiny decoder with its tokenizer; one runner per size of pool."""

    def __init__(
        self, folder: Path, kv_dtype: str, dtype: str = "float32", ops: str = "auto"
    ) -> None:
        if not (folder / "config.json").exists():
            write_tiny_checkpoint(folder, "llama", **TINY)
        self.decoder: Decoder = load_model(folder, dtype=dtype, ops=ops)
        self.tokenizer = Tokenizer.load(folder)
        self.kv_dtype = kv_dtype
        self.references: dict[tuple[tuple[int, ...], SamplingParams, int], Completion] = {}
        self._runners: dict[tuple[int, int], ModelRunner] = {}
        self._alone = self._new_runner(16, 16)
        self._alone.min_pruned_rows = sys.maxsize  # whole steps

    def runner(self, num_pages: int, page_size: int) -> ModelRunner:
        """Return the ModelRunner for a pool of this size; one engine at a time may use it."""
        if (num_pages, page_size) not in self._runners:
            runner = self._runners[num_pages, page_size] = self._new_runner(num_pages, page_size)
            runner.min_pruned_rows = 1  # whatever the last layer may leave out is left out
        return self._runners[num_pages, page_size]

    def _new_runner(self, num_pages: int, page_size: int) -> ModelRunner:
        config, dtype = self.decoder.config, self.decoder.dtype
        kept = resolve_kv_dtype(self.kv_dtype, dtype)
        spec = attention_spec(config, page_size=page_size, dtype=dtype, exact=True, kv_dtype=kept)
        pool = KVPool(kv_layout(config), num_pages, page_size, dtype=kept)
        backend = build_attention(config, spec, CpuBackend(spec, torch.device("cpu")))
        return ModelRunner(self.decoder, pool, backend)

    def reference(self, prompt: tuple[int, ...], params: SamplingParams, seed: int) -> Completion:
        """Return the answer of this request alone, on a fresh engine."""
        params = replace(params, n=1, seed=seed)
        if (prompt, params, seed) not in self.references:
            cell = Cell("alone", page_size=16, pool_tokens=16 * 16, max_batch_tokens=256)
            core = build(self, cell, Saboteur(self._alone, random.Random(0), 0.0))
            core.add_request(prompt, params)
            outputs = []
            while core.has_unfinished:
                outputs += [event.output for event in core.step() if event.output is not None]
            [output] = outputs
            assert output.error is None
            self.references[prompt, params, seed] = output.completions[0]
        return self.references[prompt, params, seed]


class TornDecoder:
    """A detokenizer that is sometimes interrupted, before or after it took a token."""

    def __init__(self, tokenizer: Tokenizer, saboteur: Saboteur) -> None:
        self._inner, self._saboteur = Detokenizer(tokenizer), saboteur

    def step(self, token_id: int) -> str:
        kind = self._saboteur.happens(self._saboteur.rate / 30, "torn before", "torn after")
        if kind == "torn before":
            raise KeyboardInterrupt
        text = self._inner.step(token_id)
        if kind:
            raise KeyboardInterrupt
        return text

    def finish(self) -> str:
        if self._saboteur.happens(self._saboteur.rate / 10, "torn at the end"):
            raise KeyboardInterrupt
        return self._inner.finish()


@dataclass
class Guesser:
    """Drafts the reference answer, or nonsense."""

    share: float
    rng: random.Random
    known: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)

    def propose(self, running: Sequence[Request]) -> Iterator[tuple[Request, tuple[int, ...]]]:
        for request in running:
            if accepts_drafts(request):
                yield request, self.guess(request, max_drafts(request))

    def verified(self, request: Request, num_accepted: int) -> None:
        assert 0 <= num_accepted <= len(request.draft)

    def guess(self, request: Request, limit: int) -> tuple[int, ...]:
        right = self.known.get((request.parent_or_self.id, request.index), ())[
            len(request.output_ids) :
        ]
        guesses = []
        for token in right[: min(limit, self.rng.randrange(6))]:
            sound = self.rng.random() < self.share
            guesses.append(token if sound else self.rng.randrange(3, 270))
        return tuple(guesses)


def build(
    model: SmallModel, cell: Cell, saboteur: Saboteur, drafter: Guesser | None = None
) -> EngineCore:
    """Build an EngineCore the way `LLM` does."""
    config = model.decoder.config
    engine_config = EngineConfig.of(
        page_size=cell.page_size,
        kv_cache_tokens=cell.pool_tokens,
        max_batch_tokens=cell.max_batch_tokens,
        max_num_seqs=cell.max_num_seqs,
        max_model_len=MAX_TOKENS,
        prefix_cache=cell.prefix_cache,
        policy=cell.policy,
        check_sample=0.02 if cell.faults else 0.0,
        step_timeout_s=0,
    )
    resolved = resolve(engine_config, model_max_len=MAX_TOKENS, token_bytes=1, free_memory=0)
    core = EngineCore(
        resolved,
        saboteur,
        vocab_size=config.vocab_size,
        eos_token_ids=config.eos_token_ids,
        detokenizer_factory=lambda _: TornDecoder(model.tokenizer, saboteur),
        drafter=drafter,
    )
    core.cache.observe_evictions(saboteur.evicted)
    return core


@dataclass
class Asked:
    """A submitted request, with the tokens and texts streamed so far."""

    prompt: tuple[int, ...]
    params: SamplingParams
    tokens: dict[int, list[int]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    output: RequestOutput | None = None


class Life:
    """One engine, from its first request until it is empty again."""

    def __init__(self, model: SmallModel, cell: Cell, seed: int) -> None:
        self.rng = random.Random(f"{cell.name} {seed}")
        self.model, self.cell = model, cell
        self.prompts = Prompts.of(random.Random(f"prompts {seed % 2}"))
        runner = model.runner(cell.pool_tokens // cell.page_size, cell.page_size)
        overlaps = isinstance(step_executor(runner), OverlappingExecutor)
        kind = OverlappingSaboteur if overlaps and chosen_runner() == "device-ahead" else Saboteur
        self.saboteur = kind(runner, self.rng, cell.faults)
        self.guesser = Guesser(cell.share_right, self.rng) if cell.share_right else None
        self.core = build(model, cell, self.saboteur, self.guesser)
        self.requests: dict[int, Asked] = {}
        self.counts: Counter[str] = Counter()

    def run(self, num_requests: int) -> Counter[str]:
        """Serve `num_requests` requests; raises AssertionError for any violated invariant."""
        left, steps, rng = num_requests, 0, self.rng
        while left or self.core.has_unfinished:
            while left and rng.random() < 0.6:
                self._add()
                left -= 1
            if rng.random() < 0.02:
                self._abort()
            self._step()
            steps += 1
            assert steps < 2000 * num_requests, "the engine makes no progress"
        self._check_end()
        self.counts["steps"] += steps
        return self.counts

    def _add(self) -> None:
        rng = self.rng
        prompt, params = self.prompts.draw(rng), rng.choice(PARAMS)
        if rng.random() < 0.04:  # in the middle of everything, a stem becomes public
            self.core.namespaces.declare_public(array("i", rng.choice(self.prompts.stems)))
        request_id = self.core.add_request(
            prompt,
            params,
            priority=rng.choice([0, 0, 0, 1, -1]),
            tenant=rng.choice(["", "", "a", "b"]),
        )
        self.requests[request_id] = Asked(prompt, params)
        if self.guesser is not None:
            for index in range(params.n):
                answer = self.expected(prompt, params, index)
                self.guesser.known[request_id, index] = answer.token_ids

    def expected(self, prompt: tuple[int, ...], params: SamplingParams, index: int) -> Completion:
        return self.model.reference(prompt, params, (params.seed or 0) + index)

    def _abort(self) -> None:
        live = [name for name, request in self.requests.items() if request.output is None]
        if not live:
            return
        name = self.rng.choice(live)
        try:
            output = self.core.abort(name)
        except KeyboardInterrupt:
            return  # the next step tells what became of it
        except UnknownRequestError:
            return  # it ended in a step that was cut off: the next one tells
        self.counts["aborts"] += 1
        self._ended(name, output, is_emitted=False)

    def _step(self) -> None:
        try:
            events = self.core.step()
        except KeyboardInterrupt:
            self.counts["interrupts"] += 1
            return
        for event in events:
            request = self.requests[event.request_id]
            assert request.output is None, "emitted after its end"
            request.tokens.setdefault(event.index, []).extend(event.new_token_ids)
            request.texts[event.index] = request.texts.get(event.index, "") + event.text
            if event.output is not None:
                self._ended(event.request_id, event.output, is_emitted=True)

    def _ended(self, name: int, output: RequestOutput, *, is_emitted: bool) -> None:
        request = self.requests[name]
        assert request.output is None, "it ended twice"
        request.output = output
        self.counts["requests"] += 1
        self.counts["read"] += output.cache.read_tokens + output.cache.shared_tokens
        self.counts["preemptions"] += output.metrics.preemptions
        for index, answer in enumerate(output.completions):
            expected = self.expected(request.prompt, request.params, index)
            self.counts["tokens"] += len(answer.token_ids)
            tokens, text = request.tokens.get(index, []), request.texts.get(index, "")
            if is_emitted:
                assert list(answer.token_ids) == tokens, "what was emitted is not the output"
                assert answer.text == text, "the text emitted is not the output's"
            if answer.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
                assert answer.token_ids == expected.token_ids[: len(answer.token_ids)]
                assert answer.text.startswith(text)
            else:
                assert answer == expected, f"{request.prompt} {request.params} answer {index}"
        if any(completion.finish_reason is FinishReason.ERROR for completion in output.completions):
            self.counts["errors"] += 1
            assert isinstance(output.error, StepFailedError)
            assert self.cell.faults, output.error

    def _check_end(self) -> None:
        core = self.core
        assert all(request.output is not None for request in self.requests.values()), (
            "a request is lost"
        )
        assert not core.live
        core.cache.check()
        stats = core.cache.stats()
        assert (stats.num_leases, stats.private_pages) == (0, 0), "leaked"
        assert stats.evictable_pages == stats.cached_pages
        assert core.table.num_free_rows == self.cell.max_num_seqs
        self.saboteur.rate = 0
        core.cache.clear()
        assert core.cache.stats().free_pages == core.cache.num_pages, "leaked"
        counts = core.recovery.counts
        assert not counts.mismatches, "a check found a contradiction"
        self.counts["repairs"] += counts.rebuilds
        self.counts["condemned"] += counts.evicted_suspect_pages
        self.counts["out of memory"] += counts.out_of_memory
        self.counts["faults"] += self.saboteur.done.total()
        self.counts["ahead"] += core.pipeline.num_ahead
