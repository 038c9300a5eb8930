"""Configuration: the options of an engine, and what they come to on one model and machine.

Each option is a field of a section, declared once with its default and help text; the command line
and the options table of the docs are made from them. The comment above a default gives its reason.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from numbers import Integral
from pathlib import Path
from typing import Any

from ramify.cache.policies import POLICIES
from ramify.errors import ConfigError, PoolTooSmallError, UnknownOptionError
from ramify.foreign_names import ENGINE_NAMES, PARAM_NAMES, python_advice
from ramify.params import SAMPLING_FIELDS
from ramify.rank_options import RankSection
from ramify.scheduler_options import OVERLAP, SchedulerSection
from ramify.tier_options import TierSection, parse_size

DTYPES = ("auto", "float32", "bfloat16")
QUANTIZE = ("off", "int8", "int4", "widen")
ACTIVATIONS = ("int16", "int8")
KV_DTYPES = ("auto", "int8", "fp8")
OPS = ("auto", "cpu", "torch", "triton")
SPECULATIVE_METHODS = ("off", "ngram", "tree", "auto")
SPECULATIVE_SAMPLING = ("exact", "rejection")
MAY_BE_NONE = (
    "max_waiting",
    "max_waiting_tokens",
    "kv_cache_tokens",
    "max_model_len",
)
# 11 days; a lock cannot wait for longer than its platform's limit
MAX_TIMEOUT_S = 1e6


def option(default: Any, help: str) -> Any:  # noqa: A002 - the word of typer and argparse
    """A field of a section: an option with its default and help text."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSection:
    """The weights, and the precision that they compute in."""

    # ships with the package: every command works without a download
    model: str = option(
        "ramify-tiny",
        "Checkpoint directory, id of a Hugging Face model (downloaded if it is not cached), or "
        "`ramify-tiny`, which is part of the package.",
    )
    revision: str | None = option(
        None, "Branch, tag or commit of a Hugging Face model. `None`: its main branch."
    )
    offline: bool = option(
        False, "Never download a model; `HF_HUB_OFFLINE=1` in the environment does the same."
    )
    dtype: str = option(
        "auto",
        "Precision of weights and arithmetic: `auto` (that of the checkpoint; float16 "
        "becomes float32 on CPU), `float32` or `bfloat16`.",
    )
    # what a checkpoint loses is the user's choice
    quantize: str = option(
        "off",
        "Round the weights of a checkpoint in full precision as they load: `int8` or `int4` (linear layers; "
        "embedding and LM head are int8). `off`: as they are stored. `widen`: quantised weights are "
        "dequantised, which `ramify verify --against-full` compares with.",
    )
    # `int8` is no default: it changes more answers than bfloat16 does
    activations: str = option(
        "int16",
        "What rows are rounded to before quantised weights multiply them: `int16`, closer to float32 than "
        "bfloat16 is, or `int8`, faster for many rows and less accurate (docs/models.md has figures).",
    )
    max_model_len: int | None = option(
        None,
        "Longest request in tokens, prompt and output together. `None`: the model's own context.",
    )
    # exact arithmetic is tested on CPUs
    device: str = option(
        "auto",
        "Device that computes: `cpu`, `cuda`, `cuda:1`, or `auto`, which is the CPU. CUDA needs `exact=False`, "
        "or `ops=triton` and `attention_backend=triton`; weights that are not quantised; it has no cache tiers, "
        "and has not run on a GPU yet.",
    )
    # never run where it counts
    decode_graphs: bool = option(
        False,
        "Capture decode steps as CUDA graphs, one for each bucket of batch sizes; needs `device=cuda`, one "
        "rank, and for a model with experts `ops=triton`. Has not run on a GPU yet.",
    )
    ops: str = option(
        "auto",
        "Operations of the model: `cpu` (compiled kernels), `torch` (plain torch, attention "
        "included), `triton` (kernels for CUDA, not yet run on a GPU) or `auto`; `ramify info` "
        "lists all, with reasons.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSection:
    """The page pool and the prefix cache in it."""

    # short enough to share most of a prefix, long enough for cheap tables
    page_size: int = option(16, "Tokens per page, the unit of allocation and sharing.")
    kv_cache_tokens: int | None = option(
        None,
        "Size of the K/V pool in tokens, rounded down to pages. `None`: as `kv_cache_memory` says.",
    )
    kv_cache_memory: int | str | None = option(
        None,
        "Size of the K/V pool, in bytes or as `8GB`. `None`: enough for `max_num_seqs` requests of "
        "`max_model_len`, at most 30 % of the free memory.",
    )
    kv_dtype: str = option(
        "auto",
        "Precision of K/V: `auto` (that of the model), `int8` or `fp8`. The last two "
        "hold more tokens in the same memory, with rounding.",
    )
    # never changes an answer, so there is no reason to start without
    prefix_cache: bool = option(
        True,
        "Share the K/V of common prefixes. With `exact` it never changes an answer.",
    )
    partial_pages: bool = option(
        True,
        "Where a prompt leaves the cached ones inside a page, copy the tokens that it shares with that "
        "page instead of computing them.",
    )
    # auto follows the traffic; the others are fixed rules
    policy: str = option(
        "auto",
        "Eviction policy: `auto` (learns from the traffic), `lru`, `lfu`, `slru`, "
        "`fifo`, `priority` (set by `llm.cache.core.set_priority`) or `cost`.",
    )

    @property
    def memory_bytes(self) -> int | None:
        """`kv_cache_memory` in bytes."""
        size = self.kv_cache_memory
        return None if size is None else parse_size("kv_cache_memory", size)

    def check_memory(self) -> None:
        """Raise ConfigError for a `kv_cache_memory` that is no size above 0."""
        if self.memory_bytes == 0:
            raise ConfigError(f"kv_cache_memory={self.kv_cache_memory!r} but it must be above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSection:
    """The attention backend, and whether a cache hit may change rounding."""

    attention_backend: str = option(
        "auto",
        "Attention backend by name. `auto`: the first that supports the model, on CUDA the faster of `triton` and "
        "`flashinfer` where that is installed and `exact=False`, timed at the first start; `ramify info` lists all, "
        "with reasons.",
    )
    # an answer that a cache hit can change is not worth having on CPU
    exact: bool = option(
        True,
        "Logits are bit-identical whatever was cached, chunked, batched or preempted, "
        "for one machine, library versions, thread count and dtype.",
    )
    verify_sample: float = option(
        0.0,
        "Share of requests (0 to 1) whose cache hits are recomputed cold and compared: "
        "by `AsyncLLM` when it is idle, by `LLM` in `verify_hits()`. Needs `exact`.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeSection:
    """Speculative decoding: drafts that one step verifies."""

    speculative: str = option(
        "off",
        "Speculative decoding: `off`, `ngram` (drafts from the request's own text), "
        "`tree` (from cached text) or `auto` (both). Output tokens stay the same.",
    )
    # with the token before them, 2 whole tiles of 8 rows
    max_draft_tokens: int = option(
        15,
        "Most draft tokens that one step verifies per request.",
    )
    speculative_sampling: str = option(
        "exact",
        "`exact`: the tokens of no speculation. `rejection`: keeps the distribution "
        "only, accepts more drafts; needs `exact=False`.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfCheckSection:
    """Audits of the engine's bookkeeping while it runs."""

    check_sample: float = option(
        0.001,
        "Share of steps (0 to 1) after which the engine recounts its pages, leases and queues.",
    )
    step_timeout_s: float = option(
        300.0,
        "A step that takes longer is reported as stuck, in seconds. 0: never.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All sections; `EngineConfig.of` makes it from flat options."""

    model: ModelSection = field(default_factory=ModelSection)
    ranks: RankSection = field(default_factory=RankSection)
    cache: CacheSection = field(default_factory=CacheSection)
    tiers: TierSection = field(default_factory=TierSection)
    scheduler: SchedulerSection = field(default_factory=SchedulerSection)
    attention: AttentionSection = field(default_factory=AttentionSection)
    speculative: SpeculativeSection = field(default_factory=SpeculativeSection)
    self_check: SelfCheckSection = field(default_factory=SelfCheckSection)

    @classmethod
    def of(cls, **options: object) -> EngineConfig:
        """Build a configuration from flat options.

        Raises:
            UnknownOptionError: a name that no section has.
            ConfigError: a value outside its range.
        """
        section_of = {
            option.name: name for name, section in SECTIONS.items() for option in fields(section)
        }
        values: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
        for name, value in options.items():
            if name not in section_of:
                raise UnknownOptionError(name, section_of, option_advice(name))
            is_path = name in ("model", "cache_dir", "cache_key", "cache_cost") and isinstance(
                value, Path
            )
            values[section_of[name]][name] = str(value) if is_path else _plain(value)
        config = cls(**{name: section(**values[name]) for name, section in SECTIONS.items()})
        config.validate()
        return config

    def validate(self) -> None:
        """Raise ConfigError for a value outside its range, naming it, the limit, the way out."""
        model = self.model.model
        if not isinstance(model, str | Path):
            raise ConfigError(f"model={model!r} but it must be a directory or a name")
        for name, value in (
            ("page_size", self.cache.page_size),
            ("max_num_seqs", self.scheduler.max_num_seqs),
            ("max_batch_tokens", self.scheduler.max_batch_tokens),
            ("max_waiting", self.scheduler.max_waiting),
            ("max_waiting_tokens", self.scheduler.max_waiting_tokens),
            ("coalesce_steps", self.scheduler.coalesce_steps),
            ("fair_wait_steps", self.scheduler.fair_wait_steps),
            ("kv_cache_tokens", self.cache.kv_cache_tokens),
            ("max_model_len", self.model.max_model_len),
            ("max_draft_tokens", self.speculative.max_draft_tokens),
        ):
            if value is None and name in MAY_BE_NONE:
                continue
            least = 0 if name in ("coalesce_steps", "fair_wait_steps") else 1
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(f"{name}={value!r} but it must be an integer >= {least}")
        self.cache.check_memory()
        for name, flag in (
            ("prefix_cache", self.cache.prefix_cache),
            ("partial_pages", self.cache.partial_pages),
            ("exact", self.attention.exact),
            ("decode_graphs", self.model.decode_graphs),
        ):
            if not isinstance(flag, bool):
                raise ConfigError(f"{name}={flag!r} but it must be True or False")
        share = self.attention.verify_sample
        _check_number("verify_sample", share, 1.0, "a share of 0 to 1")
        _check_number("check_sample", self.self_check.check_sample, 1.0, "a share of 0 to 1")
        allowed = f"0 (never) or at most {MAX_TIMEOUT_S:g} seconds"
        _check_number("step_timeout_s", self.self_check.step_timeout_s, MAX_TIMEOUT_S, allowed)
        if share and not self.attention.exact:
            raise ConfigError(
                f"verify_sample={share} with exact=False: without exactness hits may differ in "
                "rounding, so a comparison proves nothing; use exact=True, or verify_sample=0"
            )
        speculative = self.speculative
        for name, choice, choices in (
            ("dtype", self.model.dtype, DTYPES),
            ("ops", self.model.ops, OPS),
            ("overlap", self.scheduler.overlap, OVERLAP),
            ("quantize", self.model.quantize, QUANTIZE),
            ("activations", self.model.activations, ACTIVATIONS),
            ("kv_dtype", self.cache.kv_dtype, KV_DTYPES),
            # A tuple: `in` on a dict raises TypeError for an unhashable value.
            ("policy", self.cache.policy, tuple(POLICIES)),
            ("speculative", speculative.speculative, SPECULATIVE_METHODS),
            ("speculative_sampling", speculative.speculative_sampling, SPECULATIVE_SAMPLING),
        ):
            if choice not in choices:
                raise ConfigError(f"{name}={choice!r} but it must be one of {', '.join(choices)}")
        self.ranks.validate()
        self.scheduler.check_overlap(
            speculative=self.speculative.speculative, has_tiers=self.tiers.is_used
        )
        self.tiers.validate(prefix_cache=self.cache.prefix_cache)
        backend = self.attention.attention_backend
        if not isinstance(backend, str):
            raise ConfigError(f"attention_backend={backend!r} but it must be a name")
        if speculative.speculative_sampling == "rejection" and self.attention.exact:
            raise ConfigError(
                "speculative_sampling='rejection' with exact=True: the tokens would depend on what "
                "was guessed; use exact=False, or leave it at 'exact'"
            )


def option_advice(name: str) -> str:
    """What to use in place of an option that does not exist; "" if that is not known."""
    if name in ENGINE_NAMES:
        return python_advice(ENGINE_NAMES[name])
    if name in SAMPLING_FIELDS:
        return "give it to SamplingParams"
    return f"of SamplingParams; {python_advice(PARAM_NAMES[name])}" if name in PARAM_NAMES else ""


def _check_number(name: str, value: object, most: float, allowed: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        raise ConfigError(f"{name}={value!r} but it must be {allowed}")


def _plain(value: object) -> object:
    """Integers of other packages as int, a torch dtype as its name."""
    if not isinstance(value, bool) and isinstance(value, Integral):
        return int(value)
    if type(value).__module__ == "torch" and str(value).startswith("torch."):
        return str(value).removeprefix("torch.")
    return value


SECTIONS: dict[str, type[Any]] = {
    "model": ModelSection,
    "ranks": RankSection,
    "cache": CacheSection,
    "tiers": TierSection,
    "scheduler": SchedulerSection,
    "attention": AttentionSection,
    "speculative": SpeculativeSection,
    "self_check": SelfCheckSection,
}


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    """The options as resolved for one model on one machine."""

    requested: EngineConfig
    max_model_len: int  # tokens, prompt and output together
    page_size: int
    num_pages: int
    token_bytes: int  # K/V bytes of one token over all layers
    max_num_seqs: int
    max_batch_tokens: int
    window: int | None = None  # tokens that a query reads at most; None: a layer has no window

    @property
    def max_waiting_tokens(self) -> int | None:
        """Prompt tokens that may wait; None: any number."""
        scheduler = self.requested.scheduler
        if scheduler.max_waiting_tokens is None and scheduler.max_waiting is not None:
            return MAX_QUEUED_POOLS * self.kv_cache_tokens
        return scheduler.max_waiting_tokens

    @property
    def kv_cache_tokens(self) -> int:
        """Tokens that the pool holds."""
        return self.num_pages * self.page_size

    @property
    def kv_cache_bytes(self) -> int:
        """Memory of the pool, without its padding page."""
        return self.kv_cache_tokens * self.token_bytes

    @property
    def max_table_pages(self) -> int:
        """Pages in a row of the block table: those of the longest request that the pool can serve."""
        longest = -(-self.max_model_len // self.page_size)
        fits = self.num_live_pages(self.max_model_len) <= self.num_pages
        return longest if fits else min(longest, self.num_pages)

    @property
    def max_request_len(self) -> int:
        """Tokens of the longest request that context and pool can serve, prompt and answer together."""
        # The last token's K/V is never needed.
        return min(self.max_model_len, self.max_table_pages * self.page_size + 1)

    def num_live_pages(self, num_tokens: int) -> int:
        """Pages that a request of `num_tokens` tokens holds at once, at least; see `live_pages`."""
        return live_pages(num_tokens, self.page_size, self.window, self.max_batch_tokens)

    @property
    def max_window_step(self) -> int:
        """Largest `max_batch_tokens` with which a request of any length fits; 0: there is none."""
        if self.window is None:
            return 0
        return max(0, (self.num_pages - 1) * self.page_size - self.window)


def live_pages(num_tokens: int, page_size: int, window: int | None, step_tokens: int) -> int:
    """Pages that a request of `num_tokens` tokens holds at once, at least.

    With a window, those are the pages of the window and of up to `step_tokens` tokens of a step.
    """
    num_pages = -(-num_tokens // page_size)
    if window is None:
        return num_pages
    return min(num_pages, -(-(window + step_tokens) // page_size) + 1)


MAX_QUEUED_POOLS = 4  # default of `max_waiting_tokens`
TABLE_ENTRY_BYTES = 4  # a page id
MEMORY_SHARE = 0.3  # of the free memory: weights, activations and the page cache need the rest


def resolve(
    requested: EngineConfig,
    *,
    model_max_len: int,
    token_bytes: int,
    free_memory: int,
    window: int | None = None,
    default_max_len: int | None = None,
) -> ResolvedConfig:
    """Fit the requested options to a model and a machine.

    Args:
        model_max_len: tokens that the model's positions allow.
        token_bytes: K/V bytes of one token over all layers.
        free_memory: bytes that could be allocated now; 0 if unknown.
        window: the longest sliding window of the model; None if a layer has none.
        default_max_len: where the user does not say; by default `model_max_len`.

    Raises:
        ConfigError: max_model_len is beyond the model's, or the pool or the block table is larger
            than the free memory.
        PoolTooSmallError: the pool has no whole page.
    """
    max_len = requested.model.max_model_len or default_max_len or model_max_len
    if max_len > model_max_len:
        raise ConfigError(
            f"max_model_len={max_len} but the model's positions end at {model_max_len}; "
            "ask for at most that"
        )
    page_size, max_seqs = requested.cache.page_size, requested.scheduler.max_num_seqs
    tokens = requested.cache.kv_cache_tokens
    if tokens is None:
        memory = requested.cache.memory_bytes
        if memory is None:  # what all requests at their longest could use, if it fits
            most = max_seqs * -(-max_len // page_size) * page_size * token_bytes
            memory = min(int(free_memory * MEMORY_SHARE), most)
        tokens = memory // token_bytes
    num_pages = tokens // page_size
    if num_pages < 1:
        raise PoolTooSmallError(tokens, page_size)
    pool_bytes = num_pages * page_size * token_bytes
    if free_memory and pool_bytes > free_memory:
        raise ConfigError(
            f"a K/V pool of {num_pages * page_size:,} tokens needs {pool_bytes:,} bytes but only "
            f"{free_memory:,} are free; lower kv_cache_tokens or kv_cache_memory to at most that"
        )
    resolved = ResolvedConfig(
        requested=requested,
        max_model_len=max_len,
        page_size=page_size,
        num_pages=num_pages,
        token_bytes=token_bytes,
        max_num_seqs=max_seqs,
        max_batch_tokens=requested.scheduler.max_batch_tokens,
        window=window,
    )
    table_bytes = max_seqs * resolved.max_table_pages * TABLE_ENTRY_BYTES
    if free_memory and table_bytes > free_memory:
        raise ConfigError(
            f"a block table for max_num_seqs={max_seqs:,} needs {table_bytes:,} bytes but only "
            f"{free_memory:,} are free; lower max_num_seqs"
        )
    return resolved
