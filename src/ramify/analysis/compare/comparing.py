"""Compares a request with an earlier one: what is shared as sent, what is shared if causes are mended.

The prompts are walked side by side. Where they differ, the rules say whether the difference
is waste; if it is, it is stepped over as if mended, so that what stands behind it shows too. The walk
ends at content that legitimately differs, or where one prompt ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ramify.analysis.compare.continuations import is_continuation
from ramify.analysis.compare.history import goes_on_from_summary
from ramify.analysis.compare.prompt_sides import Difference, Side, WalkStep
from ramify.analysis.compare.quoting import quote
from ramify.analysis.compare.rules import RULES
from ramify.analysis.compare.templates import Templates
from ramify.analysis.compare.text_diff import common_prefix_len
from ramify.analysis.compare.tool_lists import compare_tools
from ramify.analysis.compare.walk import MessageWalk
from ramify.analysis.corpus import Corpus, StoredRequest
from ramify.analysis.records import SegmentKind, TextForm
from ramify.analysis.tokens import common_len
from ramify.analysis.verdicts import CauseName, Divergence

PAGE_SIZE = 16  # tokens; a prefix shorter than a page is no match
HEADER_TOKENS = 48  # at most, of a billing line


@dataclass(frozen=True, slots=True)
class Comparison:
    """What a request shares with an earlier one, in tokens of the request."""

    raw_tokens: int
    mended_tokens: int
    differences: tuple[Difference, ...]  # in the order of the prompt
    steps: tuple[WalkStep, ...] = ()
    end: tuple[int, int] = (0, 0)
    is_extension: bool = False  # all of the earlier prompt is shared, and no message was edited
    text_tokens: int = 0  # shared as sent, whatever the key, scope and answering model
    notes: frozenset[str] = frozenset()  # of the history, which the request has at the top


class Comparer:
    """Compares requests of a corpus."""

    def __init__(self, corpus: Corpus, templates: Templates) -> None:
        self._corpus, self._templates = corpus, templates
        self._sides: dict[int, Side] = {}
        self._unique_keys = _has_unique_keys(corpus)
        self._notes: dict[int, frozenset[str]] = {}  # by number, of requests that hoist notes

    def side(self, request: StoredRequest) -> Side:
        """The request's segments by kind."""
        side = self._sides.get(request.number)
        if side is None:
            if len(self._sides) > 4096:
                self._sides.clear()
            side = self._sides[request.number] = Side(self._corpus, self._templates, request)
        return side

    def compare(self, earlier: StoredRequest, request: StoredRequest) -> Comparison:
        """What `request` shares with `earlier`."""
        mine, other = request.info.hashed, earlier.info.hashed
        if mine is not None and other is not None:
            num_shared = mine.num_shared(other)
            return Comparison(num_shared, num_shared, ())
        a, b = self.side(earlier), self.side(request)
        continues = is_continuation(a, b) or goes_on_from_summary(a, b)
        outer = list(self._split_caches(a, b, continues=continues))
        for name, had, got in _changed_settings(a, b):
            cause = CauseName.MODEL_CHANGED if name == "model" else CauseName.SETTINGS_CHANGED
            outer.append(_change(cause, name, had, got))
        tools = compare_tools(a, b, self._templates, continues=continues)
        differences = [*outer, *tools.differences]
        mended = tools.num_shared
        steps: tuple[WalkStep, ...] = ()
        end, is_extension = (0, 0), False
        notes: frozenset[str] = frozenset()
        if tools.is_mended:
            known = self._notes.get(earlier.number, frozenset())
            walk = MessageWalk(a, b, continues=continues, notes=known)
            walk.run(RULES)
            notes = walk.notes.kept_texts()
            differences += walk.differences
            mended += walk.num_shared
            steps, end = tuple(walk.steps), walk.end
            is_extension = walk.has_all_of_first and not any(
                item.is_waste_in_message for item in walk.differences
            )
        text_tokens = 0 if a.settings != b.settings else self.raw_tokens(a, b)
        raw = 0 if outer else text_tokens
        waste = [item for item in differences if item.is_waste]
        mended = max(mended, raw)
        has_header = any(item.cause is CauseName.BILLING_HEADER for item in waste)
        if mended < PAGE_SIZE + HEADER_TOKENS * has_header:
            # Nothing but a few words stands behind what would be mended: another program's prompt.
            # A compaction within a known conversation is named all the same.
            is_known = _is_known_conversation(a, b)
            compactions = (item for item in differences if item.cause is CauseName.COMPACTION)
            differences = list(compactions) if is_known else []
            steps, end = (), (0, 0)
        elif not waste:
            mended = raw
        return Comparison(
            raw,
            mended,
            tuple(differences),
            steps,
            end,
            is_extension and continues,
            text_tokens,
            notes,
        )

    def note_match(self, request: StoredRequest, comparison: Comparison) -> None:
        """Remember what the comparison with the best match has shown about a request."""
        if comparison.notes:
            self._notes[request.number] = comparison.notes

    def raw_tokens(self, a: Side, b: Side) -> int:
        """Tokens of the common prefix, settings not counted."""
        units_a, units_b = a.prompt, b.prompt
        at = common_len(units_a, units_b)
        total = int(b.ends[at])
        if at < min(len(units_a), len(units_b)):
            total += self._corpus.shared_tokens(int(units_a[at]), int(units_b[at]))
        return total

    def divergence(self, earlier: StoredRequest, request: StoredRequest) -> Divergence | None:
        """The first difference; None if one prompt is a prefix of the other.

        Of prompts known by their blocks, the field in which the first block begins that differs, if the
        log says which field that is.
        """
        mine, other = request.info.hashed, earlier.info.hashed
        if mine is not None and other is not None:
            token = mine.num_shared(other)
            has_ended = token >= mine.block_size * min(
                len(mine.full_blocks), len(other.full_blocks)
            )
            path = "" if has_ended else mine.path_at(token)
            return Divergence(path, 0, token, "", "") if path else None
        a, b = self.side(earlier), self.side(request)
        if change := next(_changed_settings(a, b), None):
            name, had, got = change
            return Divergence(f"settings.{name}", 0, 0, quote(had, 0, 80), quote(got, 0, 80))
        at = common_len(a.prompt, b.prompt)
        is_end_a, is_end_b = at == len(a.prompt), at == len(b.prompt)
        if is_end_a and is_end_b:
            return None
        if (is_end_a or is_end_b) and not self._ends_early(a, b, at):
            return None
        token = int(b.ends[at])
        if is_end_a or is_end_b:
            return self._one_sided(a, b, at, token, missing_in_b=is_end_b)
        unit_a, unit_b = int(a.prompt[at]), int(b.prompt[at])
        kind_a, kind_b = self._corpus.units[unit_a].kind, self._corpus.units[unit_b].kind
        order = list(SegmentKind)
        if kind_a is not kind_b:
            return self._one_sided(
                a, b, at, token, missing_in_b=order.index(kind_a) < order.index(kind_b)
            )
        text_a, text_b = self._corpus.text(unit_a), self._corpus.text(unit_b)
        left, right = self._corpus.units[unit_a], self._corpus.units[unit_b]
        same_head = (left.form, left.label) == (right.form, right.label)
        if not same_head or TextForm.MEDIA in (left.form, right.form):
            had = text_a if text_a != text_b else left.label
            got = text_b if text_a != text_b else right.label
            char = 0
            return Divergence(b.path(at), char, token, quote(had, 0, 80), quote(got, 0, 80))
        char = common_prefix_len(text_a, text_b)
        if b.path(at) == "prompt" and char == min(len(text_a), len(text_b)):
            return None
        token += self._corpus.shared_tokens(unit_a, unit_b)
        had, got = (
            quote(text, _word_start(text, char), min(len(text), char + 60))
            for text in (text_a, text_b)
        )
        return Divergence(b.path(at), char, token, had, got)

    def _ends_early(self, a: Side, b: Side, at: int) -> bool:
        """Whether the longer prompt goes on within the last message, tools or system of the other."""
        longer = a if len(a.prompt) > at else b
        if at == 0:
            return True
        last, following = longer.path(at - 1), longer.path(at)
        kind = self._corpus.units[int(longer.prompt[at])].kind
        if kind is not SegmentKind.MESSAGE:
            return not following.startswith("messages")
        return last.partition(".")[0] == following.partition(".")[0]

    def _one_sided(
        self, a: Side, b: Side, at: int, token: int, *, missing_in_b: bool
    ) -> Divergence:
        side = a if missing_in_b else b
        quoted = quote(self._corpus.text(int(side.prompt[at])), 0, 80)
        had, got = (quoted, "") if missing_in_b else ("", quoted)
        return Divergence(side.path(at), 0, token, had, got)

    def _split_caches(self, a: Side, b: Side, *, continues: bool) -> Iterator[Difference]:
        """Scope, answering model and key of the cache, where they differ."""
        mine, other = b.request.info, a.request.info
        scopes, keys = (other.cache_scope, mine.cache_scope), (other.cache_key, mine.cache_key)
        models = other.response_model or other.model, mine.response_model or mine.model
        if scopes[0] != scopes[1]:
            yield _change(CauseName.NAMESPACE_SPLIT, "cache_salt", *scopes)
        if other.model == mine.model and models[0] != models[1]:
            yield _change(CauseName.MODEL_CHANGED, "model", *models)
        if keys[0] != keys[1] and (continues or self._unique_keys):
            yield _change(CauseName.CACHE_KEY_SCATTERED, "prompt_cache_key", *keys)


def _change(cause: CauseName, setting: str, had: str | None, got: str | None) -> Difference:
    return Difference.proved(cause, f"settings.{setting}", had or "", got or "")


def _changed_settings(a: Side, b: Side) -> Iterator[tuple[str, str, str]]:
    """Name and both values of each setting that differs, the model first."""
    for name in sorted(a.settings.keys() | b.settings.keys(), key=lambda n: (n != "model", n)):
        units = a.settings.get(name), b.settings.get(name)
        if units[0] != units[1]:
            had, got = ("" if unit is None else a.corpus.text(unit) for unit in units)
            yield name, had, got


def _is_known_conversation(a: Side, b: Side) -> bool:
    """Whether the log names one conversation for both requests, in which the model has answered."""
    name = b.request.info.conversation
    is_named = name is not None and name == a.request.info.conversation
    return is_named and any(map(a.is_answer, range(len(a.rest))))


def _has_unique_keys(corpus: Corpus) -> bool:
    """Whether most cache keys of a log name a single request."""
    counts: dict[str, int] = {}
    for request in corpus:
        if request.info.cache_key is not None:
            counts[request.info.cache_key] = counts.get(request.info.cache_key, 0) + 1
    single = sum(count == 1 for count in counts.values())
    return single >= 4 and single * 2 > len(counts)


def _word_start(text: str, at: int) -> int:
    start = at
    while start > 0 and at - start < 24 and not text[start - 1].isspace():
        start -= 1
    return start if start == 0 or text[start - 1].isspace() else at
