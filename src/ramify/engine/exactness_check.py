"""`ramify verify`: compares cold, warm, chunked, batched and preempted answers bit by bit.

The reference of each prompt is computed alone, cold, in one chunk and without a cache. The other
scenarios compute it warm, as an earlier turn of a longer prompt, in small chunks, in one batch with
all others, and preempted and resumed. Compared are the logits of every sampled token and all K/V
that is left in the cache.
"""

from __future__ import annotations

import hashlib
import random
import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from ramify.config import EngineConfig, resolve
from ramify.counts import counted
from ramify.engine.core import EngineCore
from ramify.engine.execution import executors
from ramify.engine.execution.runner import ModelRunner
from ramify.engine.llm import LLM
from ramify.engine.step import StepPlan, StepResult
from ramify.errors import ConfigError
from ramify.kv.pool import KVPool
from ramify.params import SamplingParams
from ramify.reasons import reason_of

CHUNK = 37  # tokens; chunks end inside pages and key blocks
LONGEST = 600  # tokens of a random prompt: more than two key blocks
TokenIds = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EngineSizes:
    """Options of an engine; all engines run the same model."""

    num_tokens: int  # of the K/V pool
    max_batch_tokens: int
    max_num_seqs: int
    prefix_cache: bool = True
    whole_steps: bool = False  # compute all rows of the last layer; else prune all it can


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference of one prompt: in K/V, by layer then position; else in logits."""

    scenario: str
    prompt: int
    position: int  # of the token whose K/V differs, or that was sampled from the logits
    layer: int | None  # None: only the logits differ
    plane: str | None

    def __str__(self) -> str:
        where = "logits" if self.layer is None else f"layer {self.layer}, plane {self.plane}"
        return f"{self.scenario}: prompt {self.prompt}, position {self.position}: {where}"


@dataclass(slots=True)
class Scenario:
    """A way to compute the prompts (warm, chunked, ...), with the result of its comparison."""

    name: str
    num_answers: int = 0
    num_logits: int = 0  # rows compared
    num_kv: int = 0  # tokens whose K/V was compared
    read_tokens: int = 0  # from the cache or from another request of the batch
    preemptions: int = 0
    differences: list[Difference] = field(default_factory=list)


@dataclass(slots=True)
class _Answer:
    tokens: TokenIds
    logits: dict[int, bytes]  # position → digest of its logits


class _DigestingRunner(ModelRunner):
    """The model and attention of another runner over its own pool; keeps digests of logits."""

    def __init__(self, runner: ModelRunner, pool: KVPool, *, whole_steps: bool) -> None:
        super().__init__(runner.model, pool, runner.backend, row_multiple=runner.row_multiple)
        self.min_pruned_rows = sys.maxsize if whole_steps else 1
        self.digests: list[bytes] = []  # of the logits of the last call

    def logits(self, hidden: Tensor, rows: Sequence[int]) -> Tensor:
        logits = super().logits(hidden, rows)
        self.digests = [
            hashlib.blake2b(row.tobytes(), digest_size=16).digest() for row in logits.cpu().numpy()
        ]
        return logits


class _DigestingExecutor:
    """Keeps the digests of the logits of all sampled tokens, by request id and position."""

    def __init__(self, runner: _DigestingRunner) -> None:
        self._runner, self._inner = runner, executors.step_executor(runner)
        self.digests: dict[int, dict[int, bytes]] = {}

    def begin(self, plan: StepPlan) -> None:
        """See `Executor.begin`."""
        self._inner.begin(plan)
        if plan.samples:
            for spec, digest in zip(plan.samples, self._runner.digests, strict=True):
                self.digests.setdefault(spec.request_id, {})[spec.position] = digest

    def finish(self) -> StepResult:
        """See `Executor.finish`."""
        return self._inner.finish()

    def zero_pages(self, pages: Sequence[int]) -> None:
        """See `Executor.zero_pages`."""
        self._inner.zero_pages(pages)

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See `Executor.copy_pages`."""
        self._inner.copy_pages(pairs)


class _Instance:
    """An engine with its own pool and cache over the model of `llm`; records logits."""

    def __init__(self, llm: LLM, sizes: EngineSizes) -> None:
        runner = llm.engine.runner
        requested = EngineConfig.of(
            page_size=llm.config.page_size,
            kv_cache_tokens=sizes.num_tokens,
            max_batch_tokens=sizes.max_batch_tokens,
            max_num_seqs=sizes.max_num_seqs,
            prefix_cache=sizes.prefix_cache,
        )
        config = resolve(
            requested,
            model_max_len=llm.config.max_model_len,
            token_bytes=llm.config.token_bytes,
            free_memory=0,
        )
        pool = runner.pool
        self.pool = KVPool(
            pool.layout, config.num_pages, config.page_size, dtype=pool.dtype, device=pool.device
        )
        self.executor = _DigestingExecutor(
            _DigestingRunner(runner, self.pool, whole_steps=sizes.whole_steps)
        )
        vocab_size = llm.engine.model_config.vocab_size
        self.core = EngineCore(
            config, self.executor, vocab_size=vocab_size, namespace=llm.core.namespaces.base
        )

    def answer(self, prompts: Sequence[TokenIds], num_new: int) -> list[_Answer]:
        """Greedy answers of `num_new` tokens, in one continuous batch."""
        params = SamplingParams(max_tokens=num_new, ignore_eos=True)
        request_ids = [self.core.add_request(prompt, params) for prompt in prompts]
        outputs = {}
        while self.core.has_unfinished:
            for event in self.core.step():
                if event.output is not None:
                    if event.output.error is not None:
                        raise event.output.error
                    outputs[event.request_id] = event.output
        digests = self.executor.digests
        return [
            _Answer(outputs[request_id].token_ids, digests.pop(request_id))
            for request_id in request_ids
        ]

    def cached(self, tokens: TokenIds) -> Iterator[tuple[int, str, Tensor]]:
        """(layer, plane, bits [T, bytes]) of the K/V of the cached prefix of `tokens`, T long."""
        cache, pool = self.core.cache, self.pool
        lease = cache.acquire(self.core.namespaces.key(array("i", tokens)))
        try:
            pages = torch.tensor(lease.pages, dtype=torch.int64)
            slots = pages.repeat_interleave(pool.page_size) * pool.page_size
            slots += torch.arange(pool.page_size).repeat(len(pages))
            for layer in range(pool.layout.num_layers):
                for name, plane in pool.planes(layer).items():
                    rows = plane.flatten(0, 1)[slots].contiguous()
                    yield layer, name, rows.flatten(1).view(torch.uint8)
        finally:
            cache.release(lease)


def random_prompts(num: int, vocab_size: int, max_len: int) -> list[TokenIds]:
    """`num` random prompts: stems of three lengths that prompts share, and a tail of their own."""
    rng = random.Random(0)  # noqa: S311 - not a secret
    longest = min(LONGEST, max_len // 2)
    stems = [tuple(rng.choices(range(vocab_size), k=longest // n)) for n in (1, 2, 5)]
    prompts = []
    for i in range(num):
        tail = rng.choices(range(vocab_size), k=1 + rng.randrange(max(1, longest // 12)))
        prompts.append((*stems[i % len(stems)], *tail))
    return prompts


class ExactnessCheck:
    """Computes prompts in every scenario, and compares the bits with each prompt computed alone.

    Args:
        llm: gives model, attention, page size and K/V dtype; its own cache is not touched.
        prompts: token ids, at least 1 each.
        num_new: tokens to decode for each.
    """

    def __init__(self, llm: LLM, prompts: Sequence[TokenIds], num_new: int = 8) -> None:
        if not prompts or num_new < 1:
            raise ConfigError(
                f"{counted(len(prompts), 'prompt')} and {counted(num_new, 'new token')}; 1 or more needed"
            )
        if (ranks := llm.engine.ranks) is not None:
            raise ConfigError(
                f"an exactness check has a K/V pool of its own, in one process, and tensor_parallel_size="
                f"{ranks.size}; compare answers that are cold and warm, or check with 1"
            )
        self._llm, self._page_size = llm, llm.config.page_size
        self.prompts, self.num_new = list(prompts), num_new
        longest, limit = max(map(len, self.prompts)) + 2 * num_new + 3, llm.config.max_model_len
        if longest > limit:
            raise ConfigError(
                f"a prompt of {max(map(len, self.prompts))} tokens and its answers need {longest} "
                f"positions, the limit is {limit}; use shorter prompts"
            )
        self._alone: dict[tuple[TokenIds, int], tuple[_Answer, list[tuple[int, str, Tensor]]]] = {}

    def scenarios(self) -> Iterator[Scenario]:
        """Run each scenario, one after the other, and yield it with its counts and differences."""
        lengths = [len(prompt) + 2 * self.num_new + self._page_size for prompt in self.prompts]
        unlimited = EngineSizes(sum(lengths) + max(lengths), 1 << 20, len(self.prompts))
        yield self._warm(unlimited)
        for name, sizes in (
            ("chunked", replace(unlimited, max_batch_tokens=CHUNK, max_num_seqs=1)),
            ("batched", unlimited),
            ("batched and chunked", replace(unlimited, max_batch_tokens=3 * CHUNK)),
        ):
            yield self._scenario(name, sizes, self.prompts, self.num_new)
        yield self._preempted()

    def _preempted(self) -> Scenario:
        """Prompts that fit into the pool together, with answers that do not: some are preempted."""
        size = self._page_size
        prompts = list(dict.fromkeys(prompt[: 2 * size] for prompt in self.prompts))
        prompts += [(*prompt[1:], prompt[0]) for prompt in prompts if len(set(prompt)) > 1]
        num_new = min(3 * size, self._llm.config.max_model_len - 2 * size - 1)
        pages = sum(-(-len(prompt) // size) for prompt in prompts) + 1
        alone = -(-(2 * size + num_new) // size)
        sizes = EngineSizes(max(pages, alone) * size, 1 << 20, len(prompts))
        return self._scenario("preempted and resumed", sizes, prompts, num_new)

    def _warm(self, sizes: EngineSizes) -> Scenario:
        """Each prompt again, and again followed by its answer and more tokens."""
        scenario, instance = Scenario("warm"), _Instance(self._llm, sizes)
        for prompt in self.prompts:
            instance.answer([prompt], self.num_new)
        for prompt in self.prompts:
            answer, _ = self._reference(prompt, self.num_new)
            longer = prompt + answer.tokens[:-1] + prompt[:3]
            self._compare(scenario, instance, [prompt], self.num_new)
            self._compare(scenario, instance, [longer], self.num_new)
        return self._finish(scenario, instance)

    def _scenario(
        self, name: str, sizes: EngineSizes, prompts: Sequence[TokenIds], num_new: int
    ) -> Scenario:
        """All prompts at once, in an engine of these sizes."""
        scenario, instance = Scenario(name), _Instance(self._llm, sizes)
        self._compare(scenario, instance, prompts, num_new)
        return self._finish(scenario, instance)

    @staticmethod
    def _finish(scenario: Scenario, instance: _Instance) -> Scenario:
        scenario.preemptions = instance.core.scheduler.num_preemptions
        scenario.read_tokens = instance.core.cache.stats().hit_tokens
        instance.core.cache.check()
        return scenario

    def _reference(
        self, prompt: TokenIds, num_new: int
    ) -> tuple[_Answer, list[tuple[int, str, Tensor]]]:
        """A prompt's answer alone, and the K/V of prompt and answer computed in one chunk."""
        if (prompt, num_new) not in self._alone:
            num_tokens = len(prompt) + num_new + 2 * self._page_size
            sizes = EngineSizes(num_tokens, 1 << 20, 1, prefix_cache=False, whole_steps=True)
            [answer] = _Instance(self._llm, sizes).answer([prompt], num_new)
            instance = _Instance(self._llm, replace(sizes, prefix_cache=True))
            whole = prompt + answer.tokens
            instance.answer([whole], 1)
            kv = [(layer, name, bits.clone()) for layer, name, bits in instance.cached((*whole, 0))]
            self._alone[prompt, num_new] = answer, kv
        return self._alone[prompt, num_new]

    def _compare(
        self,
        scenario: Scenario,
        instance: _Instance,
        prompts: Sequence[TokenIds],
        num_new: int,
    ) -> None:
        answers = instance.answer(prompts, num_new)
        for prompt, answer in zip(prompts, answers, strict=True):
            alone, kv = self._reference(prompt, num_new)
            scenario.num_answers += 1
            scenario.num_logits += len(alone.logits)
            wrong = [
                position
                for position in sorted(alone.logits)
                if answer.logits.get(position) != alone.logits[position]
            ]
            number = self.prompts.index(prompt) if prompt in self.prompts else -1
            # After the first wrong logits the tokens may differ, and their K/V with them.
            limit = min(wrong, default=len(prompt) + num_new)
            difference = self._first_kv(instance, prompt + answer.tokens, kv, limit, scenario)
            if difference is not None:
                layer, name, position = difference
                scenario.differences.append(
                    Difference(scenario.name, number, position, layer, name)
                )
            elif wrong:
                scenario.differences.append(Difference(scenario.name, number, wrong[0], None, None))

    def _first_kv(
        self,
        instance: _Instance,
        tokens: TokenIds,
        expected: list[tuple[int, str, Tensor]],
        limit: int,
        scenario: Scenario,
    ) -> tuple[int, str, int] | None:
        """The first (layer, plane, position) whose K/V differs from `expected`; None if none does."""
        compared, first = 0, None
        for (layer, name, bits), (_, _, right) in zip(
            instance.cached(tokens), expected, strict=True
        ):
            num = min(len(bits), len(right), limit)
            compared = max(compared, num)
            same = (bits[:num] == right[:num]).all(-1)
            if first is None and not bool(same.all()):
                first = layer, name, int(same.int().argmin())
        scenario.num_kv += compared
        return first


def read_prompt_lines(llm: LLM, path: Path) -> list[TokenIds]:
    """Token ids of the prompts in a text file, one per line; blank lines are skipped.

    Raises:
        ConfigError: the model has no tokenizer, or the file cannot be read or has no prompt.
    """
    if llm.tokenizer is None:
        raise ConfigError(f"{path}: the model has no tokenizer; leave out --prompts")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the prompts {path} cannot be read: {reason_of(error, path)}") from None
    prompts = [tuple(llm.tokenizer.encode(line)) for line in text.split("\n") if line.strip()]
    if not prompts:
        raise ConfigError(f"{path} has no prompt; write one on each line")
    return prompts
