"""`lint`: why requests could not read what earlier ones wrote, and what mending the causes saves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from os import PathLike
from pathlib import Path
from typing import Any

from ramify.analysis.compare.comparing import Comparer
from ramify.analysis.compare.context_blocks import message_of
from ramify.analysis.compare.evidence import OWN_ENGINES, LogFacts, MatchFacts
from ramify.analysis.compare.outside import outside_causes, unread_writes
from ramify.analysis.compare.templates import Templates
from ramify.analysis.corpus import Corpus, StoredRequest
from ramify.analysis.findings import find_partners, group_causes, order_by_saving
from ramify.analysis.log_files import read_log
from ramify.analysis.predecessor import Match, PredecessorFinder
from ramify.analysis.progress import Progress
from ramify.analysis.providers.agreement import report_tables
from ramify.analysis.providers.prompts import Prediction
from ramify.analysis.providers.replay import CacheModel, prompts_of
from ramify.analysis.providers.rules import Rules, load_rules
from ramify.analysis.reader import ReadQuality
from ramify.analysis.records import LoggedRequest, SegmentKind
from ramify.analysis.savings.fixing import Fix, PromptFixer
from ramify.analysis.savings.measure import FixReplay
from ramify.analysis.simulation.capacities import parse_capacity
from ramify.analysis.tokens import Tokenizer
from ramify.analysis.verdicts import (
    OBSERVED,
    VALUES,
    Cause,
    CauseName,
    Certainty,
    Divergence,
    LintReport,
    Partner,
    Saving,
    TokenCounts,
    Verdict,
)

Log = str | PathLike[str] | LoggedRequest

NO_SAVING = Saving(0, 0, 0, None)
MAX_NAMED = 5  # lines of requests without tokens
MAX_SAVINGS = 40  # findings that are replayed one by one; the saving of the others is 0


def lint(
    log: Log | Iterable[Log],
    *,
    provider: str | None = None,
    rules: Path | None = None,
    capacity: str | int | None = None,
    tokenizer: Tokenizer | None = None,
    format: str | None = None,  # noqa: A002 - the word of the command line
    strict: bool = False,
    progress: Progress | None = None,
    quality: ReadQuality | None = None,
) -> LintReport:
    """Compare every request of a log with the earlier one that it could share most with.

    Ctrl-C leaves a report of the requests judged so far, which says in `interrupted` what is missing.

    Args:
        log: files, or requests.
        provider: whose cache rule predicts reads and savings; by default that of the log.
        rules: file of rules and prices that extends or replaces the built-in one.
        capacity: tokens of each replica's cache, or `5M`, for predicted reads and savings; None: nothing
            is evicted. Only rules of pages (vllm, sglang, ramify) have one.
        tokenizer: counts tokens; by default they are estimated.
        format: of the files, if it shall not be recognised.
        strict: a bad line is an error.
        progress: called now and then.
        quality: counts what is read; by default a new one.

    Raises:
        LogError: a file cannot be read.
        RulesError: no rules of this provider, or a file of rules that cannot work.
        KeyboardInterrupt: interrupted before a request was judged.
    """
    quality = ReadQuality() if quality is None else quality
    corpus = Corpus(tokenizer)
    missing = ""
    try:
        for request in _requests(log, quality, format, strict=strict):
            corpus.add(request)
            if progress is not None and not len(corpus) % 256:
                progress("reading", len(corpus), 0)
    except KeyboardInterrupt:
        if not len(corpus):
            raise
        missing = f"the log was read up to request {len(corpus):,}"
    report = lint_parts(
        corpus,
        quality=quality,
        provider=provider,
        rules=rules,
        capacity=capacity,
        progress=progress,
    ).report
    return replace(report, interrupted="; ".join(filter(None, (missing, report.interrupted))))


@dataclass(frozen=True, slots=True)
class Linted:
    """A report, and what else may be asked of the same log."""

    corpus: Corpus  # the requests that were compared
    report: LintReport
    model: CacheModel
    fixer: PromptFixer
    replay: FixReplay
    predictions: Mapping[int, Prediction]  # by the request's number
    unsplit: Mapping[int, Prediction]  # if all replicas, keys and answering models shared a cache


def lint_parts(
    corpus: Corpus,
    *,
    quality: ReadQuality | None = None,
    provider: str | None = None,
    rules: Path | None = None,
    capacity: str | int | None = None,
    progress: Progress | None = None,
) -> Linted:
    """`lint` for stored requests, with the cache model, the fixer and the predictions it used.

    Ctrl-C while savings are measured leaves them 0; while requests are compared it leaves those
    compared so far: `Linted.corpus` has no others. `interrupted` says so. Causes are judged under an
    infinite cache, predictions and savings under `capacity`.
    """
    table = load_rules(rules)
    infinite, model = _cache_models(corpus, provider, table, capacity)
    templates = learn_templates(corpus, progress)
    matcher = PredecessorFinder(corpus, templates)
    comparer = matcher.comparer
    matches: list[Match] = []
    missing = []
    try:
        for match in matcher.matches(corpus):
            matches.append(match)
            if progress is not None and not len(matches) % 64:
                progress("comparing", len(matches), len(corpus))
    except KeyboardInterrupt:
        if not matches:
            raise
        missing.append(f"{len(matches):,} of {len(corpus):,} requests were compared")
        corpus, matches = _only_matched(corpus, matches)
        infinite, model = _cache_models(corpus, provider, table, capacity)
        comparer = Comparer(corpus, templates)
    log = LogFacts(infinite)
    verdicts = _judge(corpus, comparer, log, matches)
    grouped = group_causes(verdicts)
    predictions = log.predictions
    if model is not infinite:
        prompts = prompts_of(corpus)
        replayed = zip(prompts, model.replay(prompts), strict=True)
        predictions = {prompt.request.number: prediction for prompt, prediction in replayed}
    fixer = PromptFixer(corpus, templates, matches)
    replay = FixReplay(model, fixer.mend, predictions)
    mendable = [item for item in grouped if item.fix.cause not in OBSERVED]
    groups = [[item.fix] for item in mendable[:MAX_SAVINGS]]
    partners: dict[Fix, Partner] = {}
    try:
        if progress is not None:
            progress("replaying", 0, len(groups) + 1)
        savings = [*map(replay.saving, groups), replay.saving(item.fix for item in mendable)]
    except KeyboardInterrupt:
        missing.append("savings were not measured and are 0")
        savings = [NO_SAVING] * (len(groups) + 1)
    try:
        partners = find_partners(mendable, [] if missing else savings[:-1], replay.saving)
    except KeyboardInterrupt:
        missing.append("causes that save nothing alone were not tried together with others")
    saved = {item.fix: saving for item, saving in zip(mendable, savings[:-1], strict=False)}
    findings = order_by_saving(
        [item.finding(saved.get(item.fix, NO_SAVING), partners.get(item.fix)) for item in grouped]
    )
    report = LintReport(
        num_requests=len(corpus),
        verdicts=verdicts,
        findings=tuple(item for item in findings if item.cause not in OBSERVED),
        observations=tuple(item for item in findings if item.cause in OBSERVED),
        saving_all=savings[-1],
        quality=_quality(corpus, model, ReadQuality() if quality is None else quality),
        provider=model.provider,
        tables=report_tables(model, corpus.requests, predictions, verdicts),
        capacity_tokens=model.capacity_tokens,
        interrupted="; ".join(missing),
    )
    return Linted(corpus, report, model, fixer, replay, predictions, log.unsplit)


def _cache_models(
    corpus: Corpus, provider: str | None, table: Rules, capacity: str | int | None
) -> tuple[CacheModel, CacheModel]:
    """The cache without bounds, and the one of a capacity."""
    infinite = (
        CacheModel.of_log(corpus, table)
        if provider is None
        else CacheModel(corpus, provider, table)
    )
    if capacity is None:
        return infinite, infinite
    return infinite, infinite.with_capacity(parse_capacity(capacity))


def _only_matched(corpus: Corpus, matches: Sequence[Match]) -> tuple[Corpus, list[Match]]:
    """A corpus of the requests that have a match or none, and the same matches in it."""
    matched = sorted((match.request for match in matches), key=lambda request: request.number)
    part = corpus.subset(matched)
    renumbered = {old.number: new for old, new in zip(matched, part, strict=True)}

    def moved(request: StoredRequest | None) -> StoredRequest | None:
        return None if request is None else renumbered[request.number]

    return part, [
        replace(
            match,
            request=renumbered[match.request.number],
            match=moved(match.match),
            in_flight=moved(match.in_flight),
        )
        for match in matches
    ]


def _requests(
    log: Log | Iterable[Log], quality: ReadQuality, name: str | None, *, strict: bool
) -> Iterator[LoggedRequest]:
    items = [log] if isinstance(log, str | PathLike | LoggedRequest) else list(log)
    paths = [item for item in items if not isinstance(item, LoggedRequest)]
    if paths:
        yield from read_log(paths, format=name, quality=quality, strict=strict)
    for item in items:
        if isinstance(item, LoggedRequest):
            quality.num_requests += 1
            yield item


def learn_templates(corpus: Corpus, progress: Progress | None = None) -> Templates:
    """Templates of all prompts, with their slots judged."""
    templates = Templates(corpus)
    for done, request in enumerate(sorted(corpus, key=StoredRequest.start_key)):
        for unit in request.units.tolist():
            if corpus.units[unit].kind is not SegmentKind.SETTING:
                templates.add_use(unit)
        for _, parts in groupby(
            zip(request.units.tolist(), request.paths, strict=True), message_of
        ):
            templates.order.learn([unit for unit, _ in parts])
        if progress is not None and not done % 256:
            progress("learning", done, len(corpus))
    templates.judge_slots()
    return templates


def _judge(
    corpus: Corpus, comparer: Comparer, log: LogFacts, matches: Sequence[Match]
) -> tuple[Verdict, ...]:
    """Judge every request; returns verdicts in the order of the log."""
    unread = unread_writes(
        log, [match.match.number for match in matches if match.match is not None and _waste(match)]
    )
    verdicts: dict[int, Verdict] = {}
    for match in matches:
        info, best = match.request.info, match.match
        divergence = None if best is None else comparer.divergence(best, match.request)
        verdicts[match.request.number] = Verdict(
            file=info.file,
            line=info.line,
            index=info.index,
            best_match_file=None if best is None else best.info.file,
            best_match_line=None if best is None else best.info.line,
            best_match_index=None if best is None else best.info.index,
            divergence=divergence,
            causes=tuple(_causes(log, match, divergence, unread)),
            tokens=_count_tokens(corpus, match),
        )
    return tuple(verdicts[number] for number in sorted(verdicts))


def _causes(
    log: LogFacts, match: Match, divergence: Divergence | None, unread: Mapping[int, Cause]
) -> list[Cause]:
    """Causes in the prompt, then those outside it."""
    request, has_waste = match.request, _waste(match)
    causes = _merge_causes(match)
    if divergence is not None and not causes:
        causes = [
            Cause(
                CauseName.NEW_CONTENT,
                Certainty.PROVED,
                divergence.segment,
                divergence.had,
                divergence.got,
            )
        ]
    in_prompt = {cause.cause for cause in causes}
    segment = None if divergence is None else divergence.segment
    facts = MatchFacts(match.match, match.raw_tokens, has_waste=has_waste, divergence=segment)
    causes += [
        cause for cause in outside_causes(log, request, facts) if cause.cause not in in_prompt
    ]
    if match.in_flight is not None and all(
        cause.cause is not CauseName.PARALLEL_COLD for cause in causes
    ):
        # By the provider's rule there was nothing to read, or the rule is not known to apply.
        had = f"in flight: {log.name(match.in_flight.number)}"
        causes.append(Cause(CauseName.PARALLEL_COLD, Certainty.SUSPECTED, "", had))
    # What goes on from a summary is no conversation of one request.
    is_one = CauseName.COMPACTION not in in_prompt
    if request.number in unread and is_one and not has_waste:
        causes.append(unread[request.number])
    return causes


def _count_tokens(corpus: Corpus, match: Match) -> TokenCounts:
    counted, billed = corpus.num_tokens(match.request), match.request.info.usage.num_input
    rate = 1.0 if billed is None or not counted else billed / counted
    total = counted if billed is None else billed
    reusable = min(total, round(match.raw_tokens * rate))
    mended = min(total, round(match.mended_tokens * rate))
    return TokenCounts(total, reusable, max(0, mended - reusable) if _waste(match) else 0)


def _waste(match: Match) -> bool:
    return any(item.is_waste for item in match.differences)


def _merge_causes(match: Match) -> list[Cause]:
    """Each cause once, where it shows first; values in every segment in which they change."""
    seen: dict[tuple[CauseName, str], Cause] = {}
    for item in match.differences:
        if item.cause is not CauseName.NEW_CONTENT:
            place = item.segment if item.cause in VALUES else ""
            seen.setdefault((item.cause, place), item.as_cause())
    return list(seen.values())


def _quality(corpus: Corpus, model: CacheModel, quality: ReadQuality) -> dict[str, Any]:
    out = quality.as_json()
    out["tokenizer"] = "of the log" if corpus.has_token_ids else corpus.tokenizer.name
    out["is_exact"] = corpus.is_exact
    out["num_with_usage"] = sum(r.info.usage.num_input is not None for r in corpus)
    out["num_with_times"] = sum(r.info.start_s is not None for r in corpus)
    out["num_with_conversation"] = sum(r.info.conversation is not None for r in corpus)
    out["num_with_full_text"] = sum(r.info.has_full_text for r in corpus)
    out["num_with_text"] = sum(r.info.hashed is None for r in corpus)
    out["num_of_unknown_order"] = sum(
        model.provider_of(r.info) in OWN_ENGINES
        and any(path.startswith("tools[") for path in r.paths)
        for r in corpus
    )
    empty = [r for r in corpus if not r.info.usage.num_input and not corpus.num_tokens(r)]
    out["num_without_tokens"] = len(empty)
    out["lines_without_tokens"] = [[r.info.file, r.info.line] for r in empty[:MAX_NAMED]]
    out["num_with_reads"] = sum(r.info.usage.num_read is not None for r in corpus)
    return out
