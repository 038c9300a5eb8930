"""Positions of a prompt that breakpoints look back over, and breakpoints that a vendor sets itself."""

from __future__ import annotations

import json

import numpy as np
from numpy.typing import NDArray

from ramify.analysis.corpus import Corpus
from ramify.analysis.providers.prompts import PromptLayout
from ramify.analysis.records import SegmentKind, TextForm

CALLS = frozenset({"tool_use", "server_tool_use", "mcp_tool_use", "function_call"})
RESULTS = frozenset({"tool_result", "mcp_tool_result", "function_call_output"})
BLOCK_WORDS = frozenset({"document", "refusal", "thinking"})  # in labels, beside the role
LEADERS = frozenset({"system", "developer"})


class BlockRoles:
    """What the units of a corpus are to a vendor: a tool's call, its result, or a role's text."""

    def __init__(self, corpus: Corpus, *, has_names: bool) -> None:
        self._corpus = corpus
        self._has_names = has_names  # a user message's label may have the user's name
        self._roles: dict[int, str] = {}

    def role(self, unit: int) -> str:
        """`call`, `result`, or the role in the label."""
        role = self._roles.get(unit)
        if role is None:
            role = self._roles[unit] = self._find_role(unit)
        return role

    def _find_role(self, number: int) -> str:
        unit = self._corpus.units[number]
        words = unit.label.split()
        role = words[0] if words else ""
        if unit.kind is not SegmentKind.MESSAGE:
            return role
        if unit.form is TextForm.TEXT:
            has_call_id = role == "user" and len(words) > 1 and words[1] not in BLOCK_WORDS
            is_result = role == "tool" or "function_call_output" in words
            return "result" if is_result or (has_call_id and not self._has_names) else role
        if unit.form is not TextForm.JSON:
            return role
        kind = _type_of(self._corpus.text(number))
        if kind in CALLS:
            return "call"
        return "result" if kind in RESULTS or role == "tool" else role

    def positions(self, units: NDArray[np.uint32]) -> NDArray[np.int64]:
        """[units] number of the position of each; a run of calls, or of results, is one position."""
        roles = [self.role(unit) for unit in units.tolist()]
        starts = [
            at == 0 or role != roles[at - 1] or role not in {"call", "result"}
            for at, role in enumerate(roles)
        ]
        return np.cumsum(np.array(starts, np.int64)) - 1 if starts else np.zeros(0, np.int64)

    def implicit_breakpoints(self, layout: PromptLayout) -> list[int]:
        """Segments at which the vendor looks prefixes up without being asked, in order.

        The end of the leading system and developer messages, of each user message, of each group of
        tool results.
        """
        units, paths = layout.units.tolist(), layout.prompt.paths[layout.num_settings :]
        roles = [self.role(unit) for unit in units]
        leaders = 0
        while leaders < len(units) and (
            self._corpus.units[units[leaders]].kind is not SegmentKind.MESSAGE
            or roles[leaders] in LEADERS
        ):
            leaders += 1
        ends = [leaders - 1] if leaders else []
        for at in range(leaders, len(units)):
            if roles[at] not in {"user", "result"}:
                continue
            is_last = at + 1 == len(units)
            message = paths[at].split(".")[0]
            if is_last or (
                roles[at + 1] != "result"
                if roles[at] == "result"
                else paths[at + 1].split(".")[0] != message
            ):
                ends.append(at)
        return ends


def _type_of(text: str) -> str:
    try:
        value = json.loads(text)
    except ValueError:
        return ""
    kind = value.get("type") if isinstance(value, dict) else None
    return kind if isinstance(kind, str) else ""
