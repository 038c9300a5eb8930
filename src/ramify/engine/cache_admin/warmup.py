"""Warm-up prompts, computed before anybody sends them, and public prefixes."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ramify.cache.pins import Pin
from ramify.counts import counted
from ramify.engine.core import EngineCore
from ramify.engine.request_options import RequestOptions
from ramify.engine.scheduling.validation import validate_token_ids
from ramify.engine.text.prompt_inputs import Message, Prompt, prefix_token_ids, stable_prefix_ids
from ramify.errors import ConfigError, PinError, RamifyError, RequestError
from ramify.outputs import RequestOutput
from ramify.params import SamplingParams
from ramify.reasons import reason_of

if TYPE_CHECKING:
    from ramify.engine.text.tokenizer import Tokenizer

PUBLIC = "public"  # owner of the pins of public prefixes
WARM_PARAMS = SamplingParams(max_tokens=1)  # the least that computes a whole prompt
WARM_PRIORITY = -1  # beside requests
MAX_ERRORS = 16  # messages kept in a result


@dataclass(frozen=True, slots=True)
class WarmPrompt:
    """A prompt to compute, and the tenant and salt that it is cached for.

    Args:
        tools: for the chat template, with messages only.
        retention, pin_share: what to pin of it, as in `AsyncLLM.stream`.
    """

    prompt: Prompt | Sequence[Message]
    tenant: str = ""
    salt: str = ""
    tools: Sequence[Mapping[str, Any]] = ()
    retention: Sequence[tuple[int, float | None]] = ()
    pin_share: float | None = None

    def ids(self, tokenizer: Tokenizer | None) -> Sequence[int]:
        """Token ids of the prompt. Raises RequestError if it cannot be tokenised."""
        return prefix_token_ids(self.prompt, tokenizer, self.tools, add_generation_prompt=False)

    def options(self, priority: int = 0) -> RequestOptions:
        """Options of the request that computes it."""
        return RequestOptions(
            priority=priority,
            tenant=self.tenant,
            salt=self.salt,
            retention=self.retention,
            pin_share=self.pin_share,
        )


@dataclass(frozen=True, slots=True)
class WarmupResult:
    """Sums over the prompts of a warm-up."""

    num_prompts: int
    computed_tokens: int
    found_tokens: int  # cached before, or computed by another prompt of the call
    num_failed: int = 0
    errors: tuple[str, ...] = ()  # the first 16

    @classmethod
    def of(cls, results: Iterable[RequestOutput | Exception]) -> WarmupResult:
        """Add up outputs, and errors of prompts that were refused."""
        total = computed = cached = 0
        errors = []
        for result in results:
            total += 1
            error = result if isinstance(result, Exception) else result.error
            if error is not None:
                errors.append(str(error))
            if isinstance(result, RequestOutput):
                computed += result.cache.computed_tokens
                cached += result.cache.read_tokens + result.cache.shared_tokens
        return cls(total, computed, cached, len(errors), tuple(errors[:MAX_ERRORS]))

    @classmethod
    def sum(cls, results: Iterable[WarmupResult]) -> WarmupResult:
        """Add up the results of several warm-ups."""
        results = [*results]
        errors = tuple(error for result in results for error in result.errors)
        return cls(
            sum(result.num_prompts for result in results),
            sum(result.computed_tokens for result in results),
            sum(result.found_tokens for result in results),
            sum(result.num_failed for result in results),
            errors[:MAX_ERRORS],
        )


def read_prompts(path: Path) -> list[WarmPrompt]:
    """The prompts of a file; blank lines are skipped.

    Args:
        path: one text per line. In a .jsonl file one JSON object per line, with "prompt" (a text),
            "token_ids" or "messages", and optionally "tools" (with messages), "tenant" and "salt".

    Raises:
        ConfigError: the file cannot be read, or a line has another form.
    """
    try:
        lines = path.read_text("utf-8").split("\n")  # not splitlines: U+2028 is part of a text
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {reason_of(error, path)}") from error
    nonblank = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if path.suffix != ".jsonl":
        return [WarmPrompt(line) for _, line in nonblank]
    return [_parsed(line, f"{path}, line {number}") for number, line in nonblank]


def _parsed(line: str, where: str) -> WarmPrompt:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} cannot be read: {reason_of(error)}") from error
    kinds = {"prompt": str, "token_ids": list, "messages": list}
    names = [name for name in kinds if isinstance(entry, dict) and name in entry]
    if len(names) != 1 or not isinstance(entry[names[0]], kinds[names[0]]):
        raise ConfigError(
            f'{where} must be an object with one of "prompt" (a text), "token_ids" (a list) and '
            '"messages" (a list)'
        )
    options = {name: entry.get(name, "") for name in ("tenant", "salt")}
    if not all(isinstance(value, str) for value in options.values()):
        raise ConfigError(f'{where}: "tenant" and "salt" must be texts')
    tools = entry.get("tools", [])
    if not isinstance(tools, list) or (tools and names != ["messages"]):
        raise ConfigError(f'{where}: "tools" must be a list, beside "messages"')
    return WarmPrompt(entry[names[0]], tools=tools, **options)


def public_prefix_ids(
    prefixes: Sequence[WarmPrompt],
    tokenizer: Tokenizer | None,
    *,
    vocab_size: int,
    page_size: int,
) -> list[array[int]]:
    """Token ids of each prefix, as far as more text cannot change them, cut to whole pages.

    Raises:
        ConfigError: a prefix has a tenant or salt, cannot be tokenised, or is shorter than a page.
    """
    page_aligned = []
    for number, prefix in enumerate(prefixes, 1):
        if prefix.tenant or prefix.salt:
            raise ConfigError(
                f"public prefix {number} has tenant={prefix.tenant!r} and salt={prefix.salt!r}; "
                "leave them out: a public prefix is for all tenants"
            )
        try:
            ids = validate_token_ids(
                stable_prefix_ids(prefix.prompt, tokenizer, prefix.tools), vocab_size
            )
        except RequestError as error:
            raise ConfigError(f"public prefix {number} is no prompt: {error}") from error
        if len(ids) < page_size:
            raise ConfigError(
                f"public prefix {number} has {counted(len(ids), 'token')} that do not depend on what follows; "
                f"only whole pages of {page_size} can be shared"
            )
        page_aligned.append(ids[: len(ids) // page_size * page_size])
    return page_aligned


def pin_public_prefixes(
    core: EngineCore, prefixes: Sequence[array[int]], result: WarmupResult
) -> None:
    """Pin computed prefixes, and let every tenant read them; all or none.

    Args:
        prefixes: whole pages of token ids, from `public_prefix_ids`.
        result: of computing them.

    Raises:
        ConfigError: the prefix cache is off, or a prefix was refused or has been evicted.
        PinError: they take more pages than may be pinned.
    """
    if not core.config.requested.cache.prefix_cache:
        raise ConfigError("public prefixes need the prefix cache, which is off (prefix_cache)")
    if result.num_failed:
        raise ConfigError(
            f"refused: {counted(result.num_failed, 'public prefix', 'public prefixes')}: {result.errors}"
        )
    pinned = {pin.key for pin in core.cache.pins(PUBLIC)}
    pins: list[Pin] = []
    try:
        for number, ids in enumerate(prefixes, 1):
            if (key := core.namespaces.key(ids)) in pinned:
                continue
            pinned.add(key)
            pins.append(core.cache.pin(key, PUBLIC))
            if (num_cached := len(pins[-1].key)) < len(ids):
                raise ConfigError(
                    f"of public prefix {number} only {num_cached} of {len(ids)} tokens are still cached: "
                    "other requests took the pages; share it at a quieter time, or have a larger "
                    "pool (kv_cache_tokens)"
                )
    except RamifyError as error:
        for pin in pins:
            core.cache.unpin(pin)
        if isinstance(error, PinError):
            raise PinError(f"{error}; a larger pool (kv_cache_tokens) helps, too") from error
        raise
    for ids in prefixes:
        core.namespaces.declare_public(ids)
