"""Replays a log with fixes applied, and counts what is read that was not read before."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from ramify.analysis.corpus import StoredRequest
from ramify.analysis.providers.conditions import AS_LOGGED, Conditions
from ramify.analysis.providers.conversations import single_requests
from ramify.analysis.providers.positions import BlockRoles
from ramify.analysis.providers.prompts import Prediction, ReplayPrompt
from ramify.analysis.providers.replay import CacheModel, prompts_of
from ramify.analysis.savings.breakpoint_fixes import (
    add_breakpoint,
    add_steps,
    drop_last,
    keep_tool_breakpoints,
)
from ramify.analysis.savings.components import component_key, components_of
from ramify.analysis.savings.fixing import Fix
from ramify.analysis.tokens import ESTIMATE_ERROR
from ramify.analysis.verdicts import OBSERVED, CauseName, Saving

# Causes that other conditions mend, not another prompt.
_IGNORED = {
    CauseName.ROUTING: "replica",
    CauseName.CACHE_KEY_SCATTERED: "key",
    CauseName.NAMESPACE_SPLIT: "scope",
    CauseName.MODEL_CHANGED: "model",
}
_OF_BREAKPOINTS = frozenset({CauseName.BREAKPOINT_MISSING, CauseName.LOOKBACK_EXCEEDED})
# All other causes are mended in the text of prompts; the model's name is in the text.
_NOT_IN_TEXT = (
    _OF_BREAKPOINTS
    | (_IGNORED.keys() - {CauseName.MODEL_CHANGED})
    | {CauseName.UNREAD_WRITE, CauseName.TTL_EXPIRED, CauseName.PARALLEL_COLD}
)
# No change of the prompt or the client mends these; the report has no saving for them.
_UNMENDED = OBSERVED | {CauseName.EVICTED, CauseName.NEW_CONTENT}

FixPrompt = Callable[[StoredRequest, Collection[Fix]], ReplayPrompt]
"""Makes a request's prompt without these causes, in so far as they are in its text."""


class FixReplay:
    """A log as it is, and what its parts read once fixes are applied."""

    def __init__(
        self,
        model: CacheModel,
        fix_prompt: FixPrompt,
        predictions: Mapping[int, Prediction] | None = None,
    ) -> None:
        """Replays nothing yet.

        Args:
            model: the cache rules, and the corpus.
            fix_prompt: makes a mended prompt.
            predictions: of the log as it is by the same model, by the request's number, if known.
        """
        self._model, self._fix_prompt = model, fix_prompt
        self._prompts = prompts_of(model.corpus)
        self._roles = BlockRoles(model.corpus, has_names=False)
        self._savings: dict[frozenset[Fix], Saving] = {}
        self._before: dict[Conditions, list[Prediction]] = {}
        if predictions is not None:
            self._before[AS_LOGGED] = [predictions[item.request.number] for item in self._prompts]

    def saving(self, fixes: Iterable[Fix]) -> Saving:
        """What fixes save if all of them are applied together.

        `tokens` are those read in the replay of the mended log less those read in the log as it is.
        `low` and `high` are the least and the greatest of that replay and of those with both ends of the
        vendor's lifetime, widened by the error of estimated token counts. Money is what the input costs
        less, with the price of writes; it is negative if a fix writes more than its reads save, and None
        where a price is not known.

        Only the parts of the log that share a prefix with a changed prompt are replayed: the others read
        what they read before. Under a finite capacity all prompts compete, and all are replayed.
        """
        applied = [fix for fix in fixes if fix.cause not in _UNMENDED]
        if not applied:
            return Saving(0, 0, 0, 0.0)
        key = frozenset(applied)
        saving = self._savings.get(key)
        if saving is None:
            saving = self._savings[key] = self._measure(applied)
        return saving

    def _measure(self, fixes: Sequence[Fix]) -> Saving:
        mended = {
            place: prompt
            for place, before in enumerate(self._prompts)
            if (prompt := self._mend(before, fixes)) is not before
        }
        if any(fix.cause is CauseName.UNREAD_WRITE for fix in fixes):
            mended |= self._without_unread(mended, fixes)
        usual, money, has_expiries = self._replay(mended, fixes, AS_LOGGED)
        tokens = [usual]
        for conditions in self._lifetimes:
            # Where nothing expired, a longer lifetime changes nothing.
            if conditions.lifetime == "low" or has_expiries:
                tokens.append(self._replay(mended, fixes, conditions)[0])
        error = 0.0 if self._model.corpus.is_exact else ESTIMATE_ERROR
        bounds = [count * (1 + sign * error) for count in tokens for sign in (-1, 1)]
        return Saving(usual, round(min(bounds)), round(max(bounds)), money)

    def _mend(self, before: ReplayPrompt, fixes: Sequence[Fix]) -> ReplayPrompt:
        """A prompt with fixes applied; the same object if nothing changes."""
        in_text = [fix for fix in fixes if fix.cause not in _NOT_IN_TEXT]
        prompt = before
        if in_text:
            prompt = self._fix_prompt(before.request, in_text)
            prompt = replace(prompt, breakpoints=keep_tool_breakpoints(before, prompt))
        for fix in fixes:
            if fix.cause in _OF_BREAKPOINTS:
                prompt = self._mark(prompt, fix)
        same = (
            prompt.breakpoints == before.breakpoints
            and prompt.paths == before.paths
            and np.array_equal(prompt.units, before.units)
        )
        return before if same else prompt

    def _mark(self, prompt: ReplayPrompt, fix: Fix) -> ReplayPrompt:
        layout = self._model.layout(prompt)
        if layout.rule.cache != "breakpoints":
            return prompt
        if fix.cause is CauseName.BREAKPOINT_MISSING:
            return replace(prompt, breakpoints=add_breakpoint(layout, fix.segment))
        return replace(prompt, breakpoints=add_steps(layout, self._roles))

    def _without_unread(
        self, mended: Mapping[int, ReplayPrompt], fixes: Sequence[Fix]
    ) -> dict[int, ReplayPrompt]:
        """By place, prompts without the breakpoint whose entry is not read once all else is mended."""
        conditions = _conditions_of(fixes, AS_LOGGED)
        prompts, single = self._prompts, self._single
        if mended:
            prompts = [mended.get(place, prompt) for place, prompt in enumerate(prompts)]
            single = single_requests(self._model, prompts)
            predictions = self._model.replay(prompts, conditions)
        else:
            predictions = self._predictions(conditions)
        return {
            place: replace(prompt, breakpoints=drop_last(prompt.breakpoints, prediction.segment))
            for place, (prompt, prediction) in enumerate(zip(prompts, predictions, strict=True))
            if prediction.num_unread and prompt.request.number in single
        }

    @cached_property
    def _single(self) -> frozenset[int]:
        return single_requests(self._model, self._prompts)

    def _replay(
        self, mended: Mapping[int, ReplayPrompt], fixes: Sequence[Fix], usual: Conditions
    ) -> tuple[int, float | None, bool]:
        """Tokens that the changed parts of the log read more, money saved, whether entries expire."""
        conditions = _conditions_of(fixes, usual)
        before = self._predictions(usual)
        order = sorted(self._affected(mended, conditions, usual))
        after = self._model.replay(
            [mended.get(place, self._prompts[place]) for place in order], conditions
        )
        pairs = [
            (before[place], prediction) for place, prediction in zip(order, after, strict=True)
        ]
        moneys = [(old.billed.money, new.billed.money) for old, new in pairs]
        money = None
        if not any(None in prices for prices in moneys):
            money = sum((old or 0.0) - (new or 0.0) for old, new in moneys)
        tokens = sum(new.billed.num_read - old.billed.num_read for old, new in pairs)
        has_expiries = any(item.expired is not None for pair in pairs for item in pair)
        return tokens, money, has_expiries

    def _affected(
        self, mended: Mapping[int, ReplayPrompt], conditions: Conditions, usual: Conditions
    ) -> set[int]:
        """Places of the prompts whose reads may change."""
        if conditions.ignored or self._model.capacity_tokens is not None:
            return set(range(len(self._prompts)))
        key_of, members = self._components
        keys = {component_key(self._model, prompt) for prompt in mended.values()}
        keys |= {key_of[place] for place in mended}
        if conditions != usual:
            before = self._predictions(usual)
            keys |= {
                key_of[place]
                for place, prediction in enumerate(before)
                if (conditions.waits and prediction.in_flight is not None)
                or (conditions.lifetime == "longest" and prediction.expired is not None)
            }
        return {place for key in keys for place in members.get(key, ())}

    @cached_property
    def _components(self) -> tuple[list[Hashable], dict[Hashable, list[int]]]:
        return components_of(self._model, self._prompts)

    def _predictions(self, conditions: Conditions) -> list[Prediction]:
        predictions = self._before.get(conditions)
        if predictions is None:
            predictions = self._before[conditions] = self._model.replay(self._prompts, conditions)
        return predictions

    @cached_property
    def _lifetimes(self) -> list[Conditions]:
        """The ends of the vendors' lifetimes, where the log has times and a rule has a range."""
        infos = (prompt.request.info for prompt in self._prompts)
        if not any(info.start_s is not None and not info.is_batch for info in infos):
            return []
        rules = [self._model.rule_of(prompt) for prompt in self._prompts]
        has_low = any(rule.lifetime_low_s is not None for rule in rules)
        has_high = any(rule.lifetime_high_s is not None for rule in rules)
        return [Conditions(lifetime="low")] * has_low + [Conditions(lifetime="high")] * has_high


def _conditions_of(fixes: Iterable[Fix], usual: Conditions) -> Conditions:
    causes = {fix.cause for fix in fixes}
    return Conditions(
        ignored=frozenset(name for cause, name in _IGNORED.items() if cause in causes),
        lifetime="longest" if CauseName.TTL_EXPIRED in causes else usual.lifetime,
        waits=CauseName.PARALLEL_COLD in causes,
    )
