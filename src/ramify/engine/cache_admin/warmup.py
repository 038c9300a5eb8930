"""Prompts that are to be in the cache before anybody asks: from a file or a list."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ramify.cache.pins import Pin
from ramify.engine.core import EngineCore
from ramify.engine.scheduling.validation import validate_token_ids
from ramify.engine.text.prompt_inputs import Message, Prompt, prefix_token_ids, stable_prefix_ids
from ramify.errors import ConfigError, PinError, RamifyError, RequestError
from ramify.outputs import RequestOutput
from ramify.params import SamplingParams

if TYPE_CHECKING:
    from ramify.engine.text.tokenizer import Tokenizer

PUBLIC = "public"  # owner of the pins
WARM_PARAMS = SamplingParams(max_tokens=1)  # the least that computes all of a prompt
MAX_ERRORS = 16  # told; all are counted


@dataclass(frozen=True, slots=True)
class WarmPrompt:
    """One prompt, and where it is to be cached."""

    prompt: Prompt | Sequence[Message]
    tenant: str = ""
    salt: str = ""
    tools: Sequence[Mapping[str, Any]] = ()  # of a conversation, as the chat template gets them

    def ids(self, tokenizer: Tokenizer | None) -> Sequence[int]:
        """Its token ids. Raises RequestError if it cannot be tokenised."""
        return prefix_token_ids(self.prompt, tokenizer, self.tools, add_generation_prompt=False)


@dataclass(frozen=True, slots=True)
class WarmupResult:
    """What came of it."""

    num_prompts: int
    computed_tokens: int
    found_tokens: int  # there already, or computed by another prompt of the call
    num_failed: int = 0
    errors: tuple[str, ...] = ()  # the first 16

    @classmethod
    def of(cls, results: Iterable[RequestOutput | Exception]) -> WarmupResult:
        """The sum over prompts."""
        total = computed = found = 0
        errors = []
        for one in results:
            total += 1
            error = one if isinstance(one, Exception) else one.error
            if error is not None:
                errors.append(str(error))
            if isinstance(one, RequestOutput):
                computed += one.cache.computed_tokens
                found += one.cache.read_tokens + one.cache.shared_tokens
        return cls(total, computed, found, len(errors), tuple(errors[:MAX_ERRORS]))


def read_prompts(path: Path) -> list[WarmPrompt]:
    """The prompts of a file; blank lines are skipped.

    Args:
        path: a text on each line; in a file that ends in .jsonl a JSON object on each line, with
            "prompt" (a text), "token_ids" or "messages", and perhaps "tools" (of the messages),
            "tenant" and "salt".

    Raises:
        ConfigError: the file cannot be read, or a line is not like that.
    """
    try:
        lines = path.read_text("utf-8").split("\n")  # U+2028 and the like are part of a line
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as UTF-8 text: {error}") from error
    filled = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if path.suffix != ".jsonl":
        return [WarmPrompt(line) for _, line in filled]
    return [_parsed(line, f"{path}, line {number}") for number, line in filled]


def _parsed(line: str, where: str) -> WarmPrompt:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} is no JSON: {error}") from error
    kinds = {"prompt": str, "token_ids": list, "messages": list}
    names = [name for name in kinds if isinstance(found, dict) and name in found]
    if len(names) != 1 or not isinstance(found[names[0]], kinds[names[0]]):
        raise ConfigError(
            f'{where} must be an object with one of "prompt" (a text), "token_ids" (a list) and '
            '"messages" (a list)'
        )
    options = {name: found.get(name, "") for name in ("tenant", "salt")}
    if not all(isinstance(value, str) for value in options.values()):
        raise ConfigError(f'{where}: "tenant" and "salt" must be texts')
    tools = found.get("tools", [])
    if not isinstance(tools, list) or (tools and names != ["messages"]):
        raise ConfigError(f'{where}: "tools" must be a list, beside "messages"')
    return WarmPrompt(found[names[0]], tools=tools, **options)


def public_prefix_ids(
    prefixes: Sequence[WarmPrompt],
    tokenizer: Tokenizer | None,
    *,
    vocab_size: int,
    page_size: int,
) -> list[array[int]]:
    """What prompts begin with that begin with each of these: whole pages.

    Raises:
        ConfigError: one has a tenant or salt, cannot be tokenised, or is shorter than a page.
    """
    found = []
    for at, one in enumerate(prefixes, 1):
        if one.tenant or one.salt:
            raise ConfigError(
                f"public prefix {at} has tenant={one.tenant!r} and salt={one.salt!r}; it is to be "
                "everybody's: leave them out"
            )
        try:
            ids = validate_token_ids(
                stable_prefix_ids(one.prompt, tokenizer, one.tools), vocab_size
            )
        except RequestError as error:
            raise ConfigError(f"public prefix {at} is no prompt: {error}") from error
        if len(ids) < page_size:
            raise ConfigError(
                f"public prefix {at} has {len(ids)} tokens that do not depend on what follows; "
                f"only whole pages of {page_size} can be shared"
            )
        found.append(ids[: len(ids) // page_size * page_size])
    return found


def pin_public_prefixes(
    core: EngineCore, prefixes: Sequence[array[int]], result: WarmupResult
) -> None:
    """Pin prefixes that were computed, and let every tenant read them; all or none.

    Raises:
        ConfigError: one was refused, or is not there any more.
        PinError: they take more pages than may be pinned.
    """
    if not core.config.requested.cache.prefix_cache:
        raise ConfigError("public prefixes need the prefix cache, which is off (prefix_cache)")
    if result.num_failed:
        raise ConfigError(f"{result.num_failed} public prefixes were refused: {result.errors}")
    known = {pin.key for pin in core.cache.pins(PUBLIC)}
    pins: list[Pin] = []
    try:
        for at, ids in enumerate(prefixes, 1):
            if (key := core.namespaces.key(ids)) in known:
                continue
            known.add(key)
            pins.append(core.cache.pin(key, PUBLIC))
            if (kept := len(pins[-1].key)) < len(ids):
                raise ConfigError(
                    f"of public prefix {at} only {kept} of {len(ids)} tokens are still cached: "
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
