"""Replays a log with fixes applied, and counts what is read that was not read before."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ramify.analysis.corpus import Corpus, StoredRequest
from ramify.analysis.providers.conditions import Conditions
from ramify.analysis.providers.conversations import single_requests
from ramify.analysis.providers.positions import BlockRoles
from ramify.analysis.providers.prompts import Billed, Prediction, ReplayPrompt
from ramify.analysis.providers.replay import CacheModel, prompts_of
from ramify.analysis.savings.breakpoint_fixes import (
    add_breakpoint,
    add_steps,
    drop_last,
    keep_tool_breakpoints,
)
from ramify.analysis.savings.components import Components, component_key
from ramify.analysis.savings.unseen_parts import HIDING
from ramify.analysis.tokens import ESTIMATE_ERROR
from ramify.analysis.verdicts import CauseName, Saving

# Causes that other conditions mend, not another prompt.
_IGNORED = {
    CauseName.ROUTING: "replica",
    CauseName.CACHE_KEY_SCATTERED: "key",
    CauseName.NAMESPACE_SPLIT: "scope",
    CauseName.MODEL_CHANGED: "model",
}
_OF_BREAKPOINTS = frozenset({CauseName.BREAKPOINT_MISSING, CauseName.LOOKBACK_EXCEEDED})
# A fixer changes the text of prompts for all other causes; the model's name is in the text.
_NOT_IN_TEXT = (
    _OF_BREAKPOINTS
    | (_IGNORED.keys() - {CauseName.MODEL_CHANGED})
    | {CauseName.UNREAD_WRITE, CauseName.TTL_EXPIRED, CauseName.PARALLEL_COLD}
)
# No change of the prompt or the client mends these; the report has no saving for them.
_UNMENDED = frozenset(
    {
        CauseName.BELOW_MINIMUM,
        CauseName.EVICTED,
        CauseName.OUTSIDE_PROMPT,
        CauseName.NEW_CONTENT,
        CauseName.COMPACTION,
    }
)
_RANGES = {
    "low": Conditions(lifetime="low"),
    "high": Conditions(lifetime="high"),
    "waits": Conditions(waits=True),
}


class AppliedFix(Protocol):
    """A cause that is removed at a place."""

    @property
    def cause(self) -> CauseName:
        """What is removed."""
        ...

    @property
    def segment(self) -> str:
        """Where; numbers of messages may be `*`."""
        ...


class MendedLike(Protocol):
    """A prompt with fixes applied."""

    @property
    def units(self) -> NDArray[np.uint32]:
        """[segments] numbers of units."""
        ...

    @property
    def paths(self) -> tuple[str, ...]:
        """[segments]."""
        ...

    @property
    def breakpoints(self) -> tuple[tuple[int, float], ...]:
        """Segment and lifetime of each breakpoint."""
        ...


class MenderLike(Protocol):
    """Applies fixes to the text of prompts."""

    def mend(self, request: StoredRequest, fixes: Collection[AppliedFix]) -> MendedLike:
        """The request's prompt without these causes."""
        ...


class UnseenLike(Protocol):
    """Mends prompts with stand-ins for what the log never shows."""

    def mend_longest(self, request: StoredRequest, fixes: Collection[AppliedFix]) -> MendedLike:
        """The request's prompt without these causes, as long as it may be."""
        ...


_Mend = Callable[[StoredRequest, Collection[AppliedFix]], MendedLike]


@dataclass(frozen=True, slots=True)
class _Change:
    """Tokens read and money saved, by one replay."""

    tokens: int
    money: float | None
    has_waits: bool  # an entry in flight, before or after
    has_expiries: bool


def measure_savings(
    corpus: Corpus,
    fixer: MenderLike,
    groups: Sequence[Collection[AppliedFix]],
    model: CacheModel,
    *,
    unseen: UnseenLike | None = None,
) -> list[Saving]:
    """What each group of fixes saves if all of its fixes are applied together.

    `tokens` are those read in the replay of the mended log less those read in the log as it is, under
    the rule of `model`. `low` and `high` are the least and the greatest of the replays with both ends
    of the vendor's lifetime and with entries readable from the start of their request (if first outputs
    are not logged), widened by the error of estimated token counts. If causes are mended that hide parts
    from the log for ever, `high` is at least what `unseen` gives with stand-ins for them. Money is what the input costs less,
    with the price of writes; it is negative if a fix writes more than its reads save, and None where a
    price is not known.

    Only the parts of the log that share a prefix with a changed prompt are replayed: the others read
    what they read before. Under a finite capacity all prompts compete, and all are replayed.
    """
    replayer = _Replayer(corpus, list(prompts_of(corpus)), fixer, model, unseen)
    return [replayer.saving(list(group)) for group in groups]


class _Replayer:
    """The log as it is, and what its parts read under each condition."""

    def __init__(
        self,
        corpus: Corpus,
        prompts: Sequence[ReplayPrompt],
        fixer: MenderLike,
        model: CacheModel,
        unseen: UnseenLike | None,
    ) -> None:
        self._corpus, self._prompts = corpus, prompts
        self._fixer, self._model, self._unseen = fixer, model, unseen
        self._roles = BlockRoles(corpus, has_names=False)
        self._before: dict[Conditions, list[Prediction]] = {}
        self._components = Components(model, prompts)
        self._ranges = list(self._ranges_that_matter())
        self._error = 0.0 if corpus.is_exact else ESTIMATE_ERROR

    def saving(self, fixes: list[AppliedFix]) -> Saving:
        """What the fixes save together."""
        fixes = [fix for fix in fixes if fix.cause not in _UNMENDED]
        if not fixes:
            return Saving(0, 0, 0, 0.0)
        mended = self._mend_all(fixes, self._fixer.mend)
        if any(fix.cause is CauseName.UNREAD_WRITE for fix in fixes):
            mended = self._without_unread(mended, fixes)
        usual = self._replay(mended, fixes, Conditions())
        tokens = [usual.tokens]
        for conditions in self._ranges:
            # Where nothing was in flight, or nothing expired, more of it changes nothing.
            if conditions.waits and not usual.has_waits:
                continue
            if conditions.lifetime == "high" and not usual.has_expiries:
                continue
            tokens.append(self._replay(mended, fixes, conditions).tokens)
        if self._unseen is not None and any(fix.cause in HIDING for fix in fixes):
            longest = self._mend_all(fixes, self._unseen.mend_longest)
            tokens.append(self._replay(longest, fixes, Conditions()).tokens)
        bounds = [count * (1 + sign * self._error) for count in tokens for sign in (-1, 1)]
        return Saving(usual.tokens, round(min(bounds)), round(max(bounds)), usual.money)

    def _mend_all(self, fixes: list[AppliedFix], mend: _Mend) -> dict[int, ReplayPrompt]:
        """By place, the prompts that change."""
        return {
            place: prompt
            for place, before in enumerate(self._prompts)
            if (prompt := self._mend_prompt(before, fixes, mend)) is not before
        }

    def _mend_prompt(
        self, before: ReplayPrompt, fixes: Collection[AppliedFix], mend: _Mend
    ) -> ReplayPrompt:
        """A prompt with fixes applied; the same object if nothing changes."""
        in_text = [fix for fix in fixes if fix.cause not in _NOT_IN_TEXT]
        prompt = before
        if in_text:
            mended = mend(before.request, in_text)
            prompt = ReplayPrompt(
                before.request, mended.units, tuple(mended.paths), tuple(mended.breakpoints)
            )
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

    def _mark(self, prompt: ReplayPrompt, fix: AppliedFix) -> ReplayPrompt:
        layout = self._model.layout(prompt)
        if layout.rule.cache != "breakpoints":
            return prompt
        if fix.cause is CauseName.BREAKPOINT_MISSING:
            return replace(prompt, breakpoints=add_breakpoint(layout, fix.segment))
        return replace(prompt, breakpoints=add_steps(layout, self._roles))

    def _without_unread(
        self, mended: dict[int, ReplayPrompt], fixes: list[AppliedFix]
    ) -> dict[int, ReplayPrompt]:
        """Drops breakpoints whose entries are still not read once all else is mended."""
        prompts = [mended.get(place, prompt) for place, prompt in enumerate(self._prompts)]
        single = single_requests(self._model, prompts)
        predictions = self._model.replay(prompts, _conditions_of(fixes, Conditions()))
        out = dict(mended)
        for place, (prompt, prediction) in enumerate(zip(prompts, predictions, strict=True)):
            if prediction.num_unread and prompt.request.number in single:
                marks = drop_last(prompt.breakpoints, prediction.segment)
                out[place] = replace(prompt, breakpoints=marks)
        return out

    def _replay(
        self, mended: dict[int, ReplayPrompt], fixes: list[AppliedFix], usual: Conditions
    ) -> _Change:
        """What the changed parts of the log read more, under conditions."""
        conditions = _conditions_of(fixes, usual)
        before = self._predictions(usual)
        places = self._affected(mended, conditions, usual)
        order = sorted(places)
        after = self._model.replay(
            [mended.get(place, self._prompts[place]) for place in order], conditions
        )
        tokens, money = 0, 0.0
        is_priced, has_waits, has_expiries = True, False, False
        for place, prediction in zip(order, after, strict=True):
            old, new = before[place].billed, prediction.billed
            tokens += new.num_read - old.num_read
            for item in (before[place], prediction):
                has_waits |= item.in_flight is not None
                has_expiries |= item.expired is not None
            if (saved := _money_saved(old, new)) is None:
                is_priced = False
            else:
                money += saved
        return _Change(tokens, money if is_priced else None, has_waits, has_expiries)

    def _affected(
        self, mended: dict[int, ReplayPrompt], conditions: Conditions, usual: Conditions
    ) -> set[int]:
        """Places of the prompts whose reads may change."""
        if conditions.ignored or self._model.capacity_tokens is not None:
            return set(range(len(self._prompts)))
        keys = {component_key(self._model, prompt) for prompt in mended.values()}
        keys |= {self._components.key_of[place] for place in mended}
        if conditions != usual:
            before = self._predictions(usual)
            keys |= {
                self._components.key_of[place]
                for place, prediction in enumerate(before)
                if (conditions.waits and prediction.in_flight is not None)
                or (conditions.lifetime == "longest" and prediction.expired is not None)
            }
        return self._components.places(keys)

    def _predictions(self, conditions: Conditions) -> list[Prediction]:
        predictions = self._before.get(conditions)
        if predictions is None:
            predictions = self._before[conditions] = self._model.replay(self._prompts, conditions)
        return predictions

    def _ranges_that_matter(self) -> Iterator[Conditions]:
        infos = [prompt.request.info for prompt in self._prompts]
        has_times = any(info.start_s is not None and not info.is_batch for info in infos)
        if not has_times:
            return
        rules = [self._model.rule_of(prompt) for prompt in self._prompts]
        if any(rule.lifetime_low_s is not None for rule in rules):
            yield _RANGES["low"]
        if any(rule.lifetime_high_s is not None for rule in rules):
            yield _RANGES["high"]
        if any(info.start_s is not None and info.first_output_s is None for info in infos):
            yield _RANGES["waits"]


def _conditions_of(fixes: Iterable[AppliedFix], usual: Conditions) -> Conditions:
    causes = {fix.cause for fix in fixes}
    ignored = usual.ignored | {name for cause, name in _IGNORED.items() if cause in causes}
    return Conditions(
        ignored=frozenset(ignored),
        lifetime="longest" if CauseName.TTL_EXPIRED in causes else usual.lifetime,
        waits=usual.waits or CauseName.PARALLEL_COLD in causes,
    )


def _money_saved(before: Billed, after: Billed) -> float | None:
    if before.money is None or after.money is None:
        return None
    return before.money - after.money
