"""Differences of two lists of tools: order, definitions, tools added and removed."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field

from ramify.analysis.causes.templates import Templates
from ramify.analysis.causes.unit_pairs import pair_differences
from ramify.analysis.diff.normal_forms import list_orders_differ, parse_json
from ramify.analysis.diff.prompt_sides import Difference, Side
from ramify.analysis.diff.quoting import Excerpt
from ramify.analysis.diff.text_diff import common_prefix_len
from ramify.analysis.verdicts import CauseName, Certainty

_VALUES = frozenset({CauseName.CLOCK, CauseName.RANDOM_ID, CauseName.PATH_OR_STATE})


@dataclass(slots=True)
class ToolComparison:
    """Tokens shared in the tools; whether the rest of the prompt follows equal tools once mended."""

    num_shared: int = 0
    is_mended: bool = True
    differences: list[Difference] = field(default_factory=list)


def compare_tools(a: Side, b: Side, templates: Templates, *, continues: bool) -> ToolComparison:
    """Compare the tools of two requests."""
    out = ToolComparison()
    mine, other = b.tools, a.tools
    if mine == other:
        out.num_shared = b.num_tokens(mine)
        return out
    names_a, names_b = _names(a, other), _names(b, mine)
    if set(names_a) != set(names_b) and not continues:
        out.is_mended = not mine and not other
        for unit_a, unit_b in zip(other, mine, strict=False):
            if unit_a != unit_b:
                break
            out.num_shared += b.num_tokens([unit_b])
        return out
    out.num_shared = b.num_tokens(mine)
    differences: list[tuple[int, Difference]] = []
    _find_added_and_removed((a, names_a), (b, names_b), differences)
    common_a = [name for name in names_a if name in names_b]
    common_b = [name for name in names_b if name in names_a]
    if common_a != common_b:
        at = next(i for i, (x, y) in enumerate(zip(common_a, common_b, strict=True)) if x != y)
        place = names_b[common_b[at]]
        differences.append(
            (
                place,
                Difference(
                    CauseName.TOOL_ORDER,
                    Certainty.PROVED,
                    b.path(place),
                    _bare(common_a[at]),
                    _bare(common_b[at]),
                ),
            )
        )
    for name in common_b:
        unit_a, unit_b = other[names_a[name]], mine[names_b[name]]
        if unit_a == unit_b:
            continue
        path = b.path(names_b[name])
        pairs = pair_differences(a.corpus, templates, unit_a, unit_b, path, b.api)
        text_a, text_b = a.corpus.text(unit_a), b.corpus.text(unit_b)
        has_other_lists = list_orders_differ(parse_json(text_a), parse_json(text_b))
        if pairs is None or has_other_lists or any(map(_is_definition, pairs.differences)):
            if not continues:
                out.is_mended = False
                return out
            differences.append((names_b[name], _changed(path, text_a, text_b)))
        else:
            differences += [(names_b[name], item) for item in pairs.differences]
    out.differences = [item for _, item in sorted(differences, key=lambda pair: pair[0])]
    return out


def _is_definition(difference: Difference) -> bool:
    """Whether a difference within a tool is of what it is, not of a value in a description."""
    has_keys = '":' in f"{difference.had}{difference.got}"
    return difference.cause is CauseName.NEW_CONTENT or (has_keys and difference.cause in _VALUES)


def _find_added_and_removed(
    earlier: tuple[Side, dict[str, int]],
    later: tuple[Side, dict[str, int]],
    differences: list[tuple[int, Difference]],
) -> None:
    (a, names_a), (b, names_b) = earlier, later
    for name, at in names_a.items():
        if name not in names_b:
            differences.append(
                (
                    at,
                    Difference(CauseName.TOOL_CHANGED, Certainty.PROVED, a.path(at), _bare(name)),
                )
            )
    for name, at in names_b.items():
        if name not in names_a:
            differences.append(
                (
                    at,
                    Difference(
                        CauseName.TOOL_CHANGED, Certainty.PROVED, b.path(at), got=_bare(name)
                    ),
                )
            )


def _changed(path: str, had: str, got: str) -> Difference:
    at = common_prefix_len(had, got)
    return Difference(
        CauseName.TOOL_CHANGED,
        Certainty.PROVED,
        path,
        Excerpt(had, max(0, at - 10), at + 60),
        Excerpt(got, max(0, at - 10), at + 60),
    )


def _names(side: Side, units: list[int]) -> dict[str, int]:
    """Place of each tool by name; a name that comes again has a number behind it."""
    names: dict[str, int] = {}
    counts: Counter[str] = Counter()
    for at, unit in enumerate(units):
        name = tool_name(side.corpus.text(unit))
        names[f"{name}\0{counts[name]}"] = at
        counts[name] += 1
    return names


def _bare(name: str) -> Excerpt:
    return Excerpt(name.partition("\0")[0], 0, 80)


def tool_name(text: str) -> str:
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
