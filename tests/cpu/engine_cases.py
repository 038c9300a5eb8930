"""Engines built around a tiny model, which record every row of logits that they compute."""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from ramify.attention.backend import AttentionBackend
from ramify.attention.backends.cpu import CpuBackend
from ramify.attention.batch import AttentionBatch, Extend
from ramify.cache.key import CacheKey
from ramify.cache.prefix_cache import PrefixCache
from ramify.config import EngineConfig, resolve
from ramify.engine.core import EngineCore
from ramify.engine.execution.runner import ModelRunner
from ramify.engine.llm import LLM
from ramify.engine.speculation.drafter import Drafter
from ramify.engine.step import StepPlan, StepResult
from ramify.kv.block_table import PagedBlockTable
from ramify.kv.pool import KVPool
from ramify.models.decoders.decoder import Decoder
from ramify.models.kv_cache_spec import (
    attention_spec,
    build_attention,
    kv_layout,
    longest_window,
    resolve_kv_dtype,
)
from ramify.outputs import RequestOutput
from ramify.params import SamplingParams
from tests.device_runner import step_executor
from tests.pure.whole_steps import WholeSteps, run_step

CPU = torch.device("cpu")
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
Prompt = tuple[int, ...]
Logits = dict[int, Tensor]  # position of the token that is drawn → bits of its logits [vocab]


@dataclass(frozen=True)
class Reference:
    """Logits and K/V of tokens computed alone, cold, in one chunk and without a cache."""

    logits: Tensor  # bits of the rows that were asked for, [rows, vocab] int32
    kv: Tensor  # of all tokens: see `kv_bits`


@dataclass(frozen=True)
class Sizes:
    """Engine settings that must not change an answer."""

    page_size: int = 16
    num_pages: int = 256
    max_batch_tokens: int = 4096
    max_num_seqs: int = 8
    prefix_cache: bool = True
    speculative: str = "off"


@dataclass(frozen=True)
class Model:
    """A decoder, its KV dtype, attention backend and pool; mutants replace the last three fields."""

    name: str
    decoder: Decoder
    kv_dtype: str = "auto"  # as in `ramify.config`
    backend: type[AttentionBackend] = CpuBackend
    pool: type[KVPool] = KVPool
    row_multiple: int | None = None  # what the model wants

    @cached_property
    def references(self) -> dict[tuple[Prompt, int], Reference]:
        """References by tokens and first row; `reference` fills it."""
        return {}

    def with_fault(self, **changes: object) -> "Model":
        """Return the same model with another backend, pool or row multiple."""
        return replace(self, **changes)  # type: ignore[arg-type]


class RecordingRunner(ModelRunner):
    """A model over a pool as `LLM` builds it; keeps the logits of the last step.

    The last layer prunes rows in engine steps. References compute every row.
    """

    min_pruned_rows = 1

    def __init__(self, model: Model, num_pages: int, page_size: int) -> None:
        config, dtype = model.decoder.config, model.decoder.dtype
        kept = resolve_kv_dtype(model.kv_dtype, dtype)
        spec = attention_spec(config, page_size=page_size, dtype=dtype, exact=True, kv_dtype=kept)
        pool = model.pool(kv_layout(config), num_pages, page_size, dtype=kept)
        backend = build_attention(config, spec, model.backend(spec, CPU))
        super().__init__(model.decoder, pool, backend, row_multiple=model.row_multiple)
        self.last: list[Tensor] = []

    def logits(self, hidden: Tensor, rows: Sequence[int]) -> Tensor:
        logits = super().logits(hidden, rows)
        self.last.append(logits.clone())
        return logits


@dataclass
class RecordingExecutor(WholeSteps):
    """Records the row of logits of every drawn token, and fills free pages with NaN.

    It fills them before each step, so that a step that reads stale K/V gets NaN.
    """

    runner: RecordingRunner
    cache: PrefixCache | None = None
    rows: dict[int, Logits] = field(default_factory=dict)  # by request id

    def execute(self, plan: StepPlan) -> StepResult:
        assert self.cache is not None
        spoil_free_pages(self.runner.pool, self.cache)
        self.runner.last.clear()
        result = run_step(step_executor(self.runner), plan)
        row = 0
        for draw in plan.samples:
            positions = self.rows.setdefault(draw.request_id, {})
            for place in range(len(result.sampled[draw.request_id].token_ids)):
                position = draw.position + place
                assert position not in positions, "a token was drawn twice"
                positions[position] = self.runner.last[0][row + place].view(torch.int32)
            row += len(draw.draft) + 1
        return result

    def zero_pages(self, pages: Sequence[int]) -> None:
        raise AssertionError("a step failed")

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        step_executor(self.runner).copy_pages(pairs)


def spoil_free_pages(pool: KVPool, cache: PrefixCache) -> None:
    """Set every bit of the free pages and of the padding page.

    This is NaN in every float dtype; int8 codes get scales that are NaN.
    """
    free = [page for page in range(pool.num_pages) if cache.is_free(page)]
    index = torch.tensor([*free, pool.padding_page])
    for layer in range(pool.layout.num_layers):
        for plane in pool.planes(layer).values():
            plane.view(torch.uint8).index_fill_(0, index, 0xFF)


def kv_bits(pool: KVPool, slots: Tensor) -> Tensor:
    """Read the bytes of `slots` in all planes of all layers, scales too: [slots, bytes] uint8."""
    planes = [
        plane for layer in range(pool.layout.num_layers) for plane in pool.planes(layer).values()
    ]
    num_slots = (pool.num_pages + 1) * pool.page_size
    return torch.cat([plane.view(num_slots, -1).view(torch.uint8)[slots] for plane in planes], 1)


class Engine:
    """An `EngineCore` built as `LLM` builds it, around a recording executor."""

    def __init__(self, model: Model, sizes: Sizes, drafter: Drafter | None = None) -> None:
        config, dtype = model.decoder.config, model.decoder.dtype
        options = EngineConfig.of(
            page_size=sizes.page_size,
            kv_cache_tokens=sizes.num_pages * sizes.page_size,
            max_batch_tokens=sizes.max_batch_tokens,
            max_num_seqs=sizes.max_num_seqs,
            prefix_cache=sizes.prefix_cache,
            kv_dtype=model.kv_dtype,
            speculative=sizes.speculative,
        )
        resolved = resolve(
            options,
            model_max_len=config.max_model_len,
            token_bytes=kv_layout(config).token_bytes(resolve_kv_dtype(model.kv_dtype, dtype)),
            free_memory=0,
            window=longest_window(config),
        )
        runner = RecordingRunner(model, resolved.num_pages, sizes.page_size)
        self.executor = RecordingExecutor(runner)
        self.core = EngineCore(
            resolved, self.executor, vocab_size=config.vocab_size, drafter=drafter
        )
        self.executor.cache = self.core.cache

    def generate(
        self, prompts: Sequence[Prompt], num_new: Sequence[int]
    ) -> list[tuple[RequestOutput, Logits]]:
        """Answer all prompts greedily in one continuous batch, then check the cache."""
        ids = [
            self.core.add_request(prompt, SamplingParams(max_tokens=count, ignore_eos=True))
            for prompt, count in zip(prompts, num_new, strict=True)
        ]
        outputs: dict[int, RequestOutput] = {}
        # even one request at a time, each token on its own and computed twice, needs no more
        for _ in range(2 * sum(map(len, prompts)) + 2 * sum(num_new) + 100):
            if not self.core.has_unfinished:
                break
            for event in self.core.step():
                if event.output is not None:
                    outputs[event.request_id] = event.output
        assert not self.core.has_unfinished, "the engine runs for ever"
        self.core.cache.check()
        return [(outputs[request_id], self.executor.rows.pop(request_id)) for request_id in ids]

    def cached_pages(self, tokens: Prompt) -> list[int]:
        """Return the pages of the longest cached prefix; those released have the padding page's id."""
        cache = self.core.cache
        lease = cache.acquire(CacheKey(array("i", tokens), self.core.namespaces.base))
        pages = list(lease.pages)
        cache.release(lease)
        return pages

    def cached_kv(self, tokens: Prompt) -> Tensor:
        """Return the `kv_bits` of the longest cached prefix."""
        pool = self.executor.runner.pool
        pages = torch.tensor(self.cached_pages(tokens), dtype=torch.int64)
        slots = pages[:, None] * pool.page_size + torch.arange(pool.page_size)
        return kv_bits(pool, slots.flatten())


def reference(model: Model, tokens: Prompt, first_row: int) -> Reference:
    """Return the cached `Reference` of these tokens, with logits from `first_row` on."""
    known = model.references.get((tokens, first_row))
    if known is None:
        known = model.references[tokens, first_row] = cold(model, tokens, first_row)
    return known


def cold(model: Model, tokens: Prompt, first_row: int = 0) -> Reference:
    """Compute a `Reference` without storing it."""
    num_pages = -(-len(tokens) // 16)
    runner = RecordingRunner(model, num_pages, 16)
    table = PagedBlockTable.of([range(num_pages)], 16)
    batch = AttentionBatch.build([Extend(0, 0, 0, len(tokens))], table)
    hidden = runner.forward(StepPlan(batch, np.array(tokens, np.int64), (), (), (0,)))
    logits = runner.logits(hidden, range(first_row, len(tokens)))
    slots = torch.from_numpy(batch.kv_slots(0))
    return Reference(logits.view(torch.int32), kv_bits(runner.pool, slots))


def differences(
    model: Model, prompt: Prompt, answer: Prompt, logits: Logits, kv: Tensor, first_kv: int = 0
) -> Iterator[str]:
    """List how an answer, its logits and its cached K/V (`kv_bits`) differ from the reference.

    Args:
        first_kv: the first token whose K/V is compared: pages before it were released.
    """
    start = len(prompt)
    assert sorted(logits) == list(range(start, start + len(answer)))
    rows = torch.stack([logits[start + i] for i in range(len(answer))])
    assert tuple(rows.view(torch.float32).argmax(-1).tolist()) == answer, "not the likeliest"
    alone = reference(model, prompt + answer[:-1], start - 1)
    for what, wrong, first in (
        ("logits", (rows != alone.logits).any(1), start),
        ("K/V", (kv != alone.kv[: len(kv)]).any(1)[first_kv:], first_kv),
    ):
        if bool(wrong.any()):
            yield f"{what} of token {first + int(wrong.int().argmax())}"


def assert_idle(llm: LLM) -> None:
    """Assert that no request holds pages and that the whole cache can be evicted."""
    llm.cache.check()
    stats = llm.cache.stats()
    assert not llm.has_unfinished()
    assert (stats.num_leases, stats.private_pages) == (0, 0)
    llm.cache.clear()
    assert llm.cache.stats().free_pages == llm.cache.core.num_pages
    llm.cache.check()
