"""Parts of a log that share nothing: a change in one leaves the reads of the others as they are."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from ramify.analysis.providers.prompts import ReplayPrompt
from ramify.analysis.providers.replay import CacheModel


def component_key(model: CacheModel, prompt: ReplayPrompt) -> Hashable:
    """Equal for any two prompts of which one could read what the other wrote.

    Either could read at least the rule's first step, or first segment.
    """
    layout = model.layout(prompt)
    rule, info = layout.rule, prompt.request.info
    domain = (rule.models, layout.salts["all"])
    if info.hashed is not None:
        return (*domain, info.hashed.block_size, info.hashed.block_ids[:1])
    if not len(layout.units):
        return (*domain, "empty", prompt.request.number)
    if rule.cache == "breakpoints":
        return (*domain, int(layout.units[0]))
    first = max(rule.step_tokens, rule.min_tokens)
    hashes = layout.token_chain
    if len(hashes) <= first:
        return (*domain, "short", prompt.request.number)
    return (*domain, int(hashes[first]))


def components_of(
    model: CacheModel, prompts: Iterable[ReplayPrompt]
) -> tuple[list[Hashable], dict[Hashable, list[int]]]:
    """The key of each prompt, and the places of the prompts of each key."""
    keys = [component_key(model, prompt) for prompt in prompts]
    members: dict[Hashable, list[int]] = {}
    for place, key in enumerate(keys):
        members.setdefault(key, []).append(place)
    return keys, members
