"""Does the cache change an answer? Asked of a model in every way that a request can be computed.

Each prompt is computed alone, cold, in one chunk and without a cache; then warm, in small chunks,
in one batch with all others, preempted and resumed, and as an earlier turn of a longer prompt. The
logits of every token that was drawn and all K/V left in the cache are compared bit by bit.
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
from ramify.engine.core import EngineCore
from ramify.engine.execution.local_executor import LocalExecutor
from ramify.engine.execution.runner import ModelRunner
from ramify.engine.llm import LLM
from ramify.engine.step import StepPlan, StepResult
from ramify.errors import ConfigError
from ramify.kv.pool import KVPool
from ramify.params import SamplingParams

CHUNK = 37  # tokens: ends chunks inside pages and key blocks
LONGEST = 600  # tokens of a made-up prompt: more than two key blocks
TokenIds = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EngineSizes:
    """What distinguishes one engine from another over the same model."""

    num_tokens: int  # of K/V
    max_batch_tokens: int
    max_num_seqs: int
    prefix_cache: bool = True
    whole_steps: bool = False  # the last layer leaves nothing out; else, whatever it can


@dataclass(frozen=True, slots=True)
class Difference:
    """The first thing that differs for one prompt: K/V by layer, then position; or logits alone."""

    way: str
    prompt: int
    position: int  # of the token: of its K/V, or drawn from the logits
    layer: int | None  # None: the K/V before it agrees
    plane: str | None

    def __str__(self) -> str:
        """For people."""
        where = "logits" if self.layer is None else f"layer {self.layer}, plane {self.plane}"
        return f"{self.way}: prompt {self.prompt}, position {self.position}: {where}"


@dataclass(slots=True)
class Scenario:
    """What one way of computing showed."""

    name: str
    num_answers: int = 0
    num_logits: int = 0  # rows compared
    num_kv: int = 0  # tokens whose K/V was compared
    read_tokens: int = 0  # from the cache or from a batch mate
    preemptions: int = 0
    differences: list[Difference] = field(default_factory=list)


@dataclass(slots=True)
class _Answer:
    tokens: TokenIds
    logits: dict[int, bytes]  # position → digest of the row


class _DigestingRunner(ModelRunner):
    """The model and attention of another runner over a pool of its own; keeps digests of logits."""

    def __init__(self, runner: ModelRunner, pool: KVPool, *, whole_steps: bool) -> None:
        super().__init__(runner.model, pool, runner.backend, row_multiple=runner.row_multiple)
        self.min_pruned_rows = sys.maxsize if whole_steps else 1
        self.digests: list[bytes] = []  # of the rows that the last step drew from

    def logits(self, hidden: Tensor, rows: Sequence[int]) -> Tensor:
        found = super().logits(hidden, rows)
        rows_of = found.numpy()
        self.digests = [hashlib.blake2b(row.tobytes(), digest_size=16).digest() for row in rows_of]
        return found


class _DigestingExecutor(LocalExecutor):
    """Keeps, for every request, the digests of the logits that its tokens were drawn from."""

    def __init__(self, runner: _DigestingRunner) -> None:
        super().__init__(runner)
        self._digesting_runner = runner
        self.digests: dict[int, dict[int, bytes]] = {}

    def execute(self, plan: StepPlan) -> StepResult:
        result = super().execute(plan)
        if plan.samples:
            for draw, digest in zip(plan.samples, self._digesting_runner.digests, strict=True):
                self.digests.setdefault(draw.request_id, {})[draw.position] = digest
        return result


class _Instance:
    """An engine of some sizes over the model of another, its logits recorded."""

    def __init__(self, llm: LLM, sizes: EngineSizes) -> None:
        given = llm.engine.runner
        asked = EngineConfig.of(
            page_size=llm.config.page_size,
            kv_cache_tokens=sizes.num_tokens,
            max_batch_tokens=sizes.max_batch_tokens,
            max_num_seqs=sizes.max_num_seqs,
            prefix_cache=sizes.prefix_cache,
        )
        config = resolve(
            asked,
            model_max_len=llm.config.max_model_len,
            token_bytes=llm.config.token_bytes,
            free_memory=0,
        )
        pool = given.pool
        self.pool = KVPool(pool.layout, config.num_pages, config.page_size, dtype=pool.dtype)
        self.executor = _DigestingExecutor(
            _DigestingRunner(given, self.pool, whole_steps=sizes.whole_steps)
        )
        vocab_size = llm.engine.model_config.vocab_size
        self.core = EngineCore(
            config, self.executor, vocab_size=vocab_size, namespace=llm.core.namespaces.base
        )

    def answer(self, prompts: Sequence[TokenIds], num_new: int) -> list[_Answer]:
        """Answer all in one continuous batch, greedily."""
        params = SamplingParams(max_tokens=num_new, ignore_eos=True)
        ids = [self.core.add_request(prompt, params) for prompt in prompts]
        outputs = {}
        while self.core.has_unfinished:
            for event in self.core.step():
                if event.output is not None:
                    if event.output.error is not None:
                        raise event.output.error
                    outputs[event.request_id] = event.output
        return [_Answer(outputs[one].token_ids, self.executor.digests.pop(one)) for one in ids]

    def cached(self, tokens: TokenIds) -> Iterator[tuple[int, str, Tensor]]:
        """(layer, plane, bits [tokens, bytes]) of the K/V of what is cached of some tokens."""
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


def random_prompts(num: int, vocab_size: int, max_len: int, seed: int = 0) -> list[TokenIds]:
    """Random tokens: stems of several lengths that some prompts share, and tails of their own."""
    draw = random.Random(seed)  # noqa: S311  # no secret
    longest = min(LONGEST, max_len // 2)
    stems = [tuple(draw.choices(range(vocab_size), k=longest // n)) for n in (1, 2, 5)]
    found = []
    for i in range(num):
        tail = draw.choices(range(vocab_size), k=1 + draw.randrange(max(1, longest // 12)))
        found.append((*stems[i % len(stems)], *tail))
    return found


class ExactnessCheck:
    """Computes prompts in every way and compares bits with those of each prompt alone.

    Args:
        llm: whose model, attention, page size and K/V dtype are in question; its own cache is
            not touched.
        prompts: token ids, at least 1 each.
        num_new: tokens to decode for each.
    """

    def __init__(self, llm: LLM, prompts: Sequence[TokenIds], num_new: int = 8) -> None:
        if not prompts or num_new < 1:
            raise ConfigError(f"{len(prompts)} prompts and {num_new} new tokens; 1 or more needed")
        self._llm, self._page_size = llm, llm.config.page_size
        self.prompts, self.num_new = list(prompts), num_new
        longest, limit = max(map(len, self.prompts)) + 2 * num_new + 3, llm.config.max_model_len
        if longest > limit:
            raise ConfigError(
                f"a prompt of {max(map(len, self.prompts))} tokens and what is asked behind it need "
                f"{longest} positions, the limit is {limit}; use shorter prompts"
            )
        self._alone: dict[tuple[TokenIds, int], tuple[_Answer, list[tuple[int, str, Tensor]]]] = {}

    def scenarios(self) -> Iterator[Scenario]:
        """What each way of computing showed, one after the other."""
        longest = max(map(len, self.prompts)) + 2 * self.num_new + self._page_size
        total = sum(map(len, self.prompts)) + len(self.prompts) * (
            longest - max(map(len, self.prompts))
        )
        roomy = EngineSizes(total + longest, 1 << 20, len(self.prompts))
        yield self._warm(roomy)
        yield self._scenario("chunked", replace(roomy, max_batch_tokens=CHUNK, max_num_seqs=1))
        yield self._scenario("batched", roomy)
        yield self._scenario("batched and chunked", replace(roomy, max_batch_tokens=3 * CHUNK))
        yield self._preempted()

    def _preempted(self) -> Scenario:
        """Beginnings that all fit, and answers that do not: some wait, and go on where they were."""
        size = self._page_size
        prompts = list(dict.fromkeys(prompt[: 2 * size] for prompt in self.prompts))
        prompts += [(*prompt[1:], prompt[0]) for prompt in prompts if len(set(prompt)) > 1]
        num_new = min(3 * size, self._llm.config.max_model_len - 2 * size - 1)
        pages = sum(-(-len(prompt) // size) for prompt in prompts) + 1
        alone = -(-(2 * size + num_new) // size)
        sizes = EngineSizes(max(pages, alone) * size, 1 << 20, len(prompts))
        way, bench = Scenario("preempted and resumed"), _Instance(self._llm, sizes)
        self._compare(way, bench, prompts, num_new)
        return self._ended(way, bench)

    def _warm(self, sizes: EngineSizes) -> Scenario:
        """Asked again, and asked again with the answer and more behind the prompt."""
        way, bench = Scenario("warm"), _Instance(self._llm, sizes)
        for prompt in self.prompts:
            bench.answer([prompt], self.num_new)
        for prompt in self.prompts:
            self._compare(way, bench, [prompt])
            self._compare(
                way,
                bench,
                [prompt + self._reference(prompt, self.num_new)[0].tokens[:-1] + prompt[:3]],
            )
        return self._ended(way, bench)

    def _scenario(self, name: str, sizes: EngineSizes) -> Scenario:
        way, bench = Scenario(name), _Instance(self._llm, sizes)
        self._compare(way, bench, self.prompts)
        return self._ended(way, bench)

    @staticmethod
    def _ended(scenario: Scenario, instance: _Instance) -> Scenario:
        scenario.preemptions = instance.core.scheduler.num_preemptions
        stats = instance.core.cache.stats()
        scenario.read_tokens = stats.hit_tokens
        instance.core.cache.check()
        return scenario

    def _reference(
        self, prompt: TokenIds, num_new: int
    ) -> tuple[_Answer, list[tuple[int, str, Tensor]]]:
        """A prompt's answer alone, and the K/V of prompt and answer computed in one chunk."""
        if (prompt, num_new) not in self._alone:
            room = len(prompt) + num_new + 2 * self._page_size
            sizes = EngineSizes(room, 1 << 20, 1, prefix_cache=False, whole_steps=True)
            [answer] = _Instance(self._llm, sizes).answer([prompt], num_new)
            bench = _Instance(self._llm, replace(sizes, prefix_cache=True))
            whole = prompt + answer.tokens
            bench.answer([whole], 1)
            kv = [(layer, name, bits.clone()) for layer, name, bits in bench.cached((*whole, 0))]
            self._alone[prompt, num_new] = answer, kv
        return self._alone[prompt, num_new]

    def _compare(
        self,
        scenario: Scenario,
        instance: _Instance,
        prompts: Sequence[TokenIds],
        num_new: int | None = None,
    ) -> None:
        num_new = self.num_new if num_new is None else num_new
        answers = instance.answer(prompts, num_new)
        for prompt, answer in zip(prompts, answers, strict=True):
            alone, kv = self._reference(prompt, num_new)
            scenario.num_answers += 1
            scenario.num_logits += len(alone.logits)
            wrong = [at for at in sorted(alone.logits) if answer.logits.get(at) != alone.logits[at]]
            number = self.prompts.index(prompt) if prompt in self.prompts else -1
            # from the first wrong logits on the tokens may be others, and their K/V with them
            limit = min(wrong, default=len(prompt) + num_new)
            found = self._first_kv(instance, prompt + answer.tokens, kv, limit, scenario)
            if found is not None:
                layer, name, position = found
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
        """The first layer, plane and position whose K/V has other bits."""
        compared, found = 0, None
        for (layer, name, bits), (_, _, right) in zip(
            instance.cached(tokens), expected, strict=True
        ):
            num = min(len(bits), len(right), limit)
            compared = max(compared, num)
            same = (bits[:num] == right[:num]).all(-1)
            if found is None and not bool(same.all()):
                found = layer, name, int(same.int().argmin())
        scenario.num_kv += compared
        return found


def read_prompt_lines(llm: LLM, path: Path) -> list[TokenIds]:
    """The prompts of a text file, one on each line; empty lines are left out.

    Raises:
        ConfigError: the model has no tokenizer, or the file cannot be read or has no prompt.
    """
    if llm.tokenizer is None:
        raise ConfigError(f"{path}: the model has no tokenizer; leave --prompts out")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the prompts: {error}") from None
    found = [tuple(llm.tokenizer.encode(line)) for line in text.split("\n") if line.strip()]
    if not found:
        raise ConfigError(f"{path} has no prompt; write one on each line")
    return found
