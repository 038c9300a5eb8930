"""What a log says beside the text: times, usage, verdicts, replicas; and what the cache rule predicts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from ramify.analysis.corpus import StoredRequest
from ramify.analysis.providers.conditions import Conditions
from ramify.analysis.providers.conversations import single_requests
from ramify.analysis.providers.prompts import SPLITS, Prediction, PromptLayout, ReplayPrompt, Timing
from ramify.analysis.providers.replay import CacheModel, in_start_order
from ramify.analysis.providers.rules import ModelRule
from ramify.analysis.tokens import ESTIMATE_ERROR
from ramify.analysis.verdicts import Cause, CauseName, Certainty

MIN_LOSS = 64  # tokens; a smaller loss has no cause
OWN_ENGINES = frozenset({"ramify", "sglang", "vllm"})
_ROUTED_TOKENS = 256  # of the prefix that routes a request, with the key
_MINUTE_S = 60.0


@dataclass(frozen=True, slots=True)
class MatchFacts:
    """What the comparison of texts has found out about a request."""

    match: StoredRequest | None  # the best match
    reusable: int = 0  # tokens shared with it as sent
    has_waste: bool = False  # a removable cause in the text is known
    divergence: str | None = None  # segment of the first difference


@dataclass(frozen=True)
class Evidence:
    """Everything about one request that a rule may ask for."""

    request: StoredRequest
    facts: MatchFacts
    prediction: Prediction
    unsplit: Prediction  # if replicas, keys and answering models shared one cache
    rule: ModelRule
    log: LogFacts

    @cached_property
    def read_of_usage(self) -> float | None:
        """Tokens that were read by the bill, in the tokens of the prediction; None: not logged."""
        usage = self.request.info.usage
        if usage.num_read is None:
            return None
        if not usage.num_input or not self.prediction.billed.num_input:
            return float(usage.num_read)
        return usage.num_read * self.prediction.billed.num_input / usage.num_input

    @property
    def provider(self) -> str:
        """The provider whose rule the request falls under."""
        return self.log.model.provider_of(self.request.info)

    def is_lost(self, possible: int, num_read: int | None = None) -> bool:
        """Whether a request that could read some tokens read clearly fewer.

        By the bill where there is one, else by the rule.
        """
        predicted = self.prediction.billed.num_read if num_read is None else num_read
        if possible - predicted < MIN_LOSS:
            return False
        billed = self.read_of_usage
        return billed is None or possible - billed >= max(MIN_LOSS, ESTIMATE_ERROR * possible)

    @property
    def has_own_reason(self) -> bool:
        """Whether our own server has recorded why it missed, so that no rule needs to guess."""
        info = self.request.info
        return info.provider == "ramify" and info.verdict is not None

    @property
    def is_billed_miss(self) -> bool:
        """Whether the bill is known; with `is_lost`, that it shows the loss."""
        return self.read_of_usage is not None

    @property
    def miss_by_bills(self) -> tuple[int, int] | None:
        """Input of the best match and reads of this request as billed; None if half of it was read.

        For logs without breakpoints or with parts of the prompt, whose text does not say what could
        be read.
        """
        match, num_read = self.facts.match, self.request.info.usage.num_read
        before = None if match is None else match.info.usage.num_input
        if before is None or num_read is None:
            return None
        return (
            None if 2 * num_read > before or before < self.rule.min_tokens else (before, num_read)
        )

    def pause_since(self, earlier: StoredRequest) -> float | None:
        """Seconds since an earlier request ended; None if they are not known."""
        return Timing.of(self.request.info).since(earlier.info)

    @property
    def has_clean_text(self) -> bool:
        """Whether the whole prompt is logged, and no removable cause is known in it."""
        return self.request.info.has_full_text and not self.facts.has_waste

    @property
    def hides_breakpoints(self) -> bool:
        """Whether the log does not show where the vendor had breakpoints, though it has the kind."""
        if self.rule.cache != "breakpoints" or self.rule.implicit:
            return False
        return not (self.request.info.has_full_text and self.log.has_breakpoints)

    def segment_at(self, num_tokens: int) -> int:
        """The segment in which a prefix of `num_tokens` ends; -1 for the empty prefix."""
        return self.log.model.layout(ReplayPrompt.of(self.request)).segment_at(num_tokens)

    def is_in_messages(self, num_tokens: int) -> bool:
        """Whether a prefix of `num_tokens` ends in a message."""
        return self.path(self.segment_at(num_tokens)).startswith("messages")

    def path(self, segment: int) -> str:
        """Path of a segment; "" if there is none."""
        return self.request.paths[segment] if 0 <= segment < len(self.request.paths) else ""


# Names one cause that text cannot prove, if the evidence speaks for it.
OutsideRule = Callable[[Evidence], Cause | None]


def outside_cause(
    name: CauseName, *, segment: str = "", had: str = "", got: str = "", is_likely: bool = True
) -> Cause:
    """A cause that is likely, or else suspected; without a proof in the text."""
    certainty = Certainty.LIKELY if is_likely else Certainty.SUSPECTED
    return Cause(name, certainty, segment, had, got)


class LogFacts:
    """What the requests of a log say together, and the predictions for each."""

    def __init__(self, model: CacheModel) -> None:
        prompts = in_start_order(map(ReplayPrompt.of, model.corpus))
        self.model = model
        self.requests = {prompt.request.number: prompt.request for prompt in prompts}
        self.predictions = _by_number(prompts, model.replay(prompts))
        splits = (
            {request.info.replica for request in self.requests.values()},
            {request.info.cache_key for request in self.requests.values()},
            {(prompt.request.info.model, model.answered_by(prompt)) for prompt in prompts},
        )
        is_split = any(len(values) > 1 for values in splits)
        self.unsplit = (
            _by_number(prompts, model.replay(prompts, Conditions(ignored=SPLITS)))
            if is_split
            else self.predictions
        )
        self.has_breakpoints = any(request.breakpoints for request in self.requests.values())
        self.has_reads = any(request.info.usage.num_read for request in self.requests.values())
        self.key_rates = _key_rates(model, prompts)
        self.single = single_requests(model, prompts)
        starts = [request.info.start_s for request in self.requests.values()]
        self.last_start_s = max((start for start in starts if start is not None), default=None)

    def evidence(self, request: StoredRequest, facts: MatchFacts) -> Evidence:
        """Everything about a request."""
        return Evidence(
            request,
            facts,
            self.predictions[request.number],
            self.unsplit[request.number],
            self.model.rule_of(ReplayPrompt.of(request)),
            self,
        )

    def is_rule_assumed(self, number: int) -> bool:
        """Whether a request's model has no rule of its own, and the assumed one writes by itself."""
        rule = self.model.rule_of(ReplayPrompt.of(self.requests[number]))
        return rule.implicit and bool(rule.note)

    def ends_within_lifetime(self, number: int) -> bool:
        """Whether the log ends before the entries of a request would have expired."""
        prompt = ReplayPrompt.of(self.requests[number])
        timing, lifetime_s = Timing.of(prompt.request.info), self.model.rule_of(prompt).lifetime_s
        if self.last_start_s is None or timing.lookup_s is None:
            return True
        return lifetime_s is None or self.last_start_s < timing.ready_s + lifetime_s

    def name(self, number: int | None) -> str:
        """File and line of a request."""
        if number is None:
            return ""
        info = self.requests[number].info
        return f"{info.file}:{info.line}"


def _by_number(
    prompts: Sequence[ReplayPrompt], predictions: Sequence[Prediction]
) -> dict[int, Prediction]:
    pairs = zip(prompts, predictions, strict=True)
    return {prompt.request.number: prediction for prompt, prediction in pairs}


def _key_rates(model: CacheModel, prompts: Iterable[ReplayPrompt]) -> dict[int, int]:
    """Requests of the last minute with the same key and first tokens, where there are too many."""
    recent: dict[tuple[object, int], deque[float]] = {}
    rates = {}
    for prompt in prompts:
        info, limit = prompt.request.info, model.rule_of(prompt).max_requests_per_key_min
        if limit is None or info.start_s is None or info.is_batch or not len(prompt.units):
            continue
        times = recent.setdefault((info.cache_key, _routed_prefix(model.layout(prompt))), deque())
        times.append(info.start_s)
        while times[0] < info.start_s - _MINUTE_S:
            times.popleft()
        if len(times) > limit:
            rates[prompt.request.number] = len(times)
    return rates


def _routed_prefix(layout: PromptLayout) -> int:
    """Hash of the units that hold the first tokens."""
    after = int(layout.ends.searchsorted(_ROUTED_TOKENS))
    return int(layout.chain[min(after, len(layout.chain) - 1)])
