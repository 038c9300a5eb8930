"""Differences of two lists of tools: order, definitions, tools added and removed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import takewhile
from operator import itemgetter

from ramify.analysis.compare.normal_forms import list_orders_differ, parse_json
from ramify.analysis.compare.prompt_sides import Difference, Side
from ramify.analysis.compare.quoting import NOTHING, Excerpt
from ramify.analysis.compare.templates import Templates
from ramify.analysis.compare.text_diff import common_prefix_len
from ramify.analysis.compare.unit_pairs import pair_differences
from ramify.analysis.corpus import Corpus
from ramify.analysis.verdicts import CHANGING_VALUES, CauseName, Certainty


@dataclass(slots=True)
class ToolComparison:
    """Tokens shared in the tools; whether the rest of the prompt follows equal tools once mended."""

    num_shared: int = 0
    is_mended: bool = True
    differences: list[Difference] = field(default_factory=list)


def compare_tools(a: Side, b: Side, templates: Templates, *, continues: bool) -> ToolComparison:
    """Compare the tools of two requests."""
    mine, other = b.tools, a.tools
    if mine == other:
        return ToolComparison(b.num_tokens(mine))
    names_a, names_b = tool_places(a.corpus, other), tool_places(b.corpus, mine)
    if set(names_a) != set(names_b) and not continues:
        pairs = zip(other, mine, strict=False)
        equal = [unit for unit, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]
        return ToolComparison(b.num_tokens(equal), is_mended=not mine and not other)
    # With their places, by which they are sorted.
    differences = [
        (at, _changed(a.path(at), had=_bare(name)))
        for name, at in names_a.items()
        if name not in names_b
    ] + [
        (at, _changed(b.path(at), got=_bare(name)))
        for name, at in names_b.items()
        if name not in names_a
    ]
    common_a = [name for name in names_a if name in names_b]
    common_b = [name for name in names_b if name in names_a]
    if common_a != common_b:
        had, got = next(pair for pair in zip(common_a, common_b, strict=True) if len(set(pair)) > 1)
        path = b.path(names_b[got])
        order = Difference(CauseName.TOOL_ORDER, Certainty.PROVED, path, _bare(had), _bare(got))
        differences.append((names_b[got], order))
    for name in common_b:
        unit_a, unit_b, at = other[names_a[name]], mine[names_b[name]], names_b[name]
        if unit_a == unit_b:
            continue
        pair = pair_differences(a.corpus, templates, unit_a, unit_b, b.path(at), b.api)
        text_a, text_b = a.corpus.text(unit_a), b.corpus.text(unit_b)
        has_other_lists = list_orders_differ(parse_json(text_a), parse_json(text_b))
        if (
            pair is not None
            and not has_other_lists
            and not any(map(_is_definition, pair.differences))
        ):
            differences += [(at, item) for item in pair.differences]
        elif continues:
            differences.append((at, _definition_changed(b.path(at), text_a, text_b)))
        else:
            return ToolComparison(b.num_tokens(mine), is_mended=False)
    differences.sort(key=itemgetter(0))
    return ToolComparison(b.num_tokens(mine), differences=[item for _, item in differences])


def _is_definition(difference: Difference) -> bool:
    """Whether a difference within a tool is of what it is, not of a value in a description."""
    has_keys = '":' in f"{difference.had}{difference.got}"
    return difference.cause is CauseName.NEW_CONTENT or (
        has_keys and difference.cause in CHANGING_VALUES
    )


def _changed(path: str, had: Excerpt = NOTHING, got: Excerpt = NOTHING) -> Difference:
    return Difference(CauseName.TOOL_CHANGED, Certainty.PROVED, path, had, got)


def _definition_changed(path: str, had: str, got: str) -> Difference:
    at = common_prefix_len(had, got)
    start, end = max(0, at - 10), at + 60
    return Difference.proved(CauseName.TOOL_CHANGED, path, had, got, start, end)


def tool_places(corpus: Corpus, units: Iterable[int]) -> dict[str, int]:
    """Place of each tool by name; behind a name stands how often it came before."""
    places: dict[str, int] = {}
    counts: Counter[str] = Counter()
    for at, unit in enumerate(units):
        name = _tool_name(corpus.text(unit))
        places[f"{name}\0{counts[name]}"] = at
        counts[name] += 1
    return places


def _bare(name: str) -> Excerpt:
    return Excerpt(name.partition("\0")[0], 0, 80)


def _tool_name(text: str) -> str:
    """Name of a tool definition; the definition itself if it has none."""
    value = parse_json(text)
    if isinstance(value, dict):
        function = value.get("function")
        for holder in (value, function if isinstance(function, dict) else {}):
            for key in ("name", "server_label"):
                if isinstance(holder.get(key), str):
                    return str(holder[key])
        if isinstance(value.get("type"), str):
            return str(value["type"])
        return json.dumps(value, sort_keys=True)
    return text
