"""The report's first sentence: a number with its unit, denominator and baseline."""

from __future__ import annotations

from ramify.analysis.report.document import Analysis, HitRate
from ramify.analysis.report.wording.numbers import count, duration, money, percent
from ramify.analysis.verdicts import LintReport
from ramify.counts import counted

HOUR_S = 3600.0
SAME_COUNT = 0.01  # of two counts of the input


def headline(analysis: Analysis) -> str:
    """What was read, what could have been, and what the difference costs."""
    size = f"{counted(analysis.lint.num_requests, 'request')}, {count(analysis.num_input)} input tokens"
    base = analysis.rate("reported") or analysis.rate("by_rule")
    sentences = [f"{size}."]
    if base is not None:
        source = (
            "were read from a cache, as the log reports"
            if base.name == "reported"
            else f"are read under {rule_words(analysis.lint)}"
        )
        if is_part := base.num_requests < analysis.lint.num_requests:
            sentences.append(
                f"Of the {count(base.num_input)} tokens of the "
                f"{counted(base.num_requests, 'request')} {_which(analysis, base)}, "
                f"{percent(base.share)} {source}."
            )
        else:
            sentences.append(f"{percent(base.share)} {source}.")
        possible = analysis.rate("possible")
        if possible is not None:
            those = " of the same tokens" if is_part else ""
            sentences.append(
                f"{percent(possible.share)}{those} were possible with all causes mended and nothing "
                "evicted."
            )
    saving = analysis.lint.saving_all
    if saving.tokens > 0:
        sentences.append(f"Mending all findings saves {_saving(analysis)}.")
    return " ".join(sentences)


def _which(analysis: Analysis, base: HitRate) -> str:
    """What the requests of the rates have that others lack."""
    if base.name != "reported":
        return "that log their whole prompt"
    num_with_reads = analysis.lint.quality.get("num_with_reads", base.num_requests)
    both = " and their whole prompt" if base.num_requests < num_with_reads else ""
    return f"that log cached tokens{both}"


def rule_words(lint: LintReport) -> str:
    """`the rule of vllm at a capacity of 5,000,000 tokens`; of several providers each with its share."""
    providers = lint.tables.get("rules", {}).get("providers") or {lint.provider: 0}
    if len(providers) == 1:
        words = f"the cache rule of {next(iter(providers))}"
    else:
        shares = (f"{name} ({counted(number, 'request')})" for name, number in providers.items())
        words = f"the cache rules of {', '.join(shares)}"
    if lint.capacity_tokens is not None:
        words += f" at a capacity of {lint.capacity_tokens:,} tokens"
    return words


def counted_words(analysis: Analysis) -> str:
    """How savings count the input, where usage counts another number of tokens."""
    if abs(analysis.num_counted - analysis.num_input) <= SAME_COUNT * analysis.num_input:
        return ""
    return f" as counted in the prompts ({count(analysis.num_counted)})"


def _saving(analysis: Analysis) -> str:
    saving = analysis.lint.saving_all
    parts = [f"{count(saving.tokens)} tokens"]
    if analysis.num_counted:
        share = percent(saving.tokens / analysis.num_counted)
        parts.append(f"{share} of the input{counted_words(analysis)}")
    if saving.money is not None:
        parts.append(money(saving.money))
    text = ", ".join(parts)
    if analysis.duration_s and analysis.duration_s >= HOUR_S / 60:
        hours = analysis.duration_s / HOUR_S
        rate = f"{count(saving.tokens / hours)} tokens"
        if saving.money is not None:
            rate += f" and {money(saving.money / hours)}"
        text += f" in {duration(analysis.duration_s)}: {rate} an hour"
    return text
