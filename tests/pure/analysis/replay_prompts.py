"""Small logs for the tests of cache rules: a prompt is a list of texts with a kind and a breakpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ramify.analysis.corpus import Corpus
from ramify.analysis.providers import CacheModel, Prediction, load_rules, prompts_of
from ramify.analysis.records import LoggedRequest, Segment, SegmentKind, TextForm, Usage


@dataclass(frozen=True)
class Block:
    """A segment; `tokens` numbers joined by spaces are token ids."""

    tokens: tuple[int, ...]
    kind: str = "message"
    ttl: float | None = None
    role: str = "user"
    text: str = ""  # JSON instead of tokens


def tokens(start: int, count: int) -> tuple[int, ...]:
    return tuple(range(start, start + count))


def request_of(
    blocks: list[Block],
    *,
    model: str = "claude-sonnet-4-5",
    start: float | None = None,
    first: float | None = None,
    end: float | None = None,
    settings: dict[str, str] | None = None,
    output: list[Block] | None = None,
    **info,
) -> LoggedRequest:
    """A request; ids of tokens are exact, so that counts in tests are."""
    segments = [
        Segment(f"settings.{name}", SegmentKind.SETTING, value)
        for name, value in {"model": model, **(settings or {})}.items()
    ]
    counts: dict[str, int] = {}
    for block in blocks:
        number = counts[block.kind] = counts.get(block.kind, -1) + 1
        path = {
            "tool": f"tools[{number}]",
            "system": f"system[{number}]",
            "message": f"messages[{number}]",
        }[block.kind]
        segments.append(segment_of(block, path))
    return LoggedRequest(
        "log.jsonl",
        info.pop("line", 1),
        segments=tuple(segments),
        output=tuple(segment_of(block, "messages[0]") for block in output or []),
        model=model,
        start_s=start,
        first_output_s=first,
        end_s=end,
        **info,
    )


def segment_of(block: Block, path: str) -> Segment:
    kind = SegmentKind(block.kind)
    if block.text:
        return Segment(path, kind, block.text, TextForm.JSON, block.role, block.ttl)
    text = " ".join(map(str, block.tokens))
    return Segment(path, kind, text, TextForm.TOKENS, "", block.ttl)


def corpus_of(requests: list[LoggedRequest]) -> Corpus:
    corpus = Corpus()
    for request in requests:
        corpus.add(request)
    return corpus


def predict(
    provider: str, requests: list[LoggedRequest], rules: Path | None = None
) -> list[Prediction]:
    """Predictions in the order of starts."""
    corpus = corpus_of(requests)
    return CacheModel(corpus, provider, load_rules(rules)).replay(prompts_of(corpus))


def usage_of(num_input: int, num_read: int, num_written: int | None = None) -> Usage:
    return Usage(num_input, num_read, num_written)
