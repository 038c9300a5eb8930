"""Requests of a log as a `PageTrace`: blocks of hashed traces, or pages of texts and token ids."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ramify.analysis.corpus import Corpus
from ramify.analysis.records import HashedPrompt, LoggedRequest, Segment, SegmentKind
from ramify.analysis.simulation.page_trace import PageTrace, PageTraceBuilder
from ramify.analysis.tokens import Tokenizer, Tokens
from ramify.errors import ConfigError, LogError

DEFAULT_PAGE_SIZE = 16  # of prompts that the log has as text or token ids


@dataclass(frozen=True, slots=True)
class TraceSource:
    """A trace, and what the log lacked."""

    trace: PageTrace
    is_exact: bool  # token counts are those of the log or of a tokenizer, not estimates
    num_without_prompt: int  # requests of which only the length is known
    num_incomplete: int  # requests whose text the log has cut
    is_partial: bool = False  # reading was interrupted


def page_trace(
    requests: Iterable[LoggedRequest],
    *,
    page_size: int | None = None,
    insert_outputs: bool = False,
    tokenizer: Tokenizer | None = None,
) -> TraceSource:
    """Read the pages of all prompts; prompts are not kept. Ctrl-C ends the trace where it is.

    Args:
        page_size: tokens; None: the block size of a hashed trace, 16 for texts and token ids. For a
            hashed trace a multiple of its block size.
        insert_outputs: add the pages of the answers. Of an answer without text only the number of
            pages is known, so that no later prompt can share them.
        tokenizer: of texts; None estimates.

    Raises:
        LogError: no request has a prompt.
        ConfigError: the page size does not fit.
    """
    reader = _PageReader(page_size, Corpus(tokenizer), insert_outputs=insert_outputs)
    try:
        for request in requests:
            reader.add(request, request.segments)
    except KeyboardInterrupt:
        if not reader.has_requests:
            raise
        return replace(reader.close(), is_partial=True)
    return reader.close()


def corpus_trace(
    corpus: Corpus, *, page_size: int | None = None, insert_outputs: bool = False
) -> TraceSource:
    """The pages of all prompts of a corpus, whose tokens it has; see `page_trace`.

    Without a page size, a corpus of several block sizes, or of hashes and texts, has pages of their
    least common multiple.
    """
    if page_size is None:
        blocks = {stored.info.hashed.block_size for stored in corpus if stored.info.hashed}
        page_size = math.lcm(*blocks) if blocks else None
    reader = _PageReader(page_size, corpus, insert_outputs=insert_outputs)
    for stored in corpus:
        reader.add(stored.info, stored.units.tolist())
    return reader.close()


class _PageReader:
    """Adds requests to a trace whose page size the first prompt decides."""

    def __init__(self, page_size: int | None, corpus: Corpus, *, insert_outputs: bool) -> None:
        if page_size is not None and page_size < 1:
            raise ConfigError(f"page_size={page_size} but a page holds at least 1 token")
        self._asked, self._insert_outputs = page_size, insert_outputs
        self._builder: PageTraceBuilder | None = None
        self._corpus = corpus
        self._kinds: Counter[str] = Counter()

    def add(self, request: LoggedRequest, prompt: Sequence[Segment] | list[int]) -> None:
        """Add a request; one without a prompt is counted.

        Args:
            prompt: segments, or the corpus's units of them.
        """
        if request.hashed is not None:
            self._add_hashed(request, request.hashed)
            return
        numbers = [item if isinstance(item, int) else self._corpus.unit_of(item) for item in prompt]
        units = self._corpus.units
        settings = [unit for unit in numbers if units[unit].kind is SegmentKind.SETTING]
        if len(settings) < len(numbers):
            self._add_text(request, settings, [unit for unit in numbers if unit not in settings])
        else:
            self._kinds["no prompt"] += 1

    @property
    def has_requests(self) -> bool:
        """Whether there is a request with a prompt."""
        return self._builder is not None and len(self._builder) > 0

    def close(self) -> TraceSource:
        """The trace of all requests."""
        if self._builder is None:
            num_bare = self._kinds["no prompt"]
            if num_bare:
                raise LogError(
                    f"none of the {num_bare:,} requests has a prompt: the log has lengths only, so "
                    "no sharing analysis is possible; log prompts, token ids or block hashes"
                )
            raise LogError("the log has no requests; nothing to simulate")
        return TraceSource(
            trace=self._builder.build(),
            is_exact=not self._kinds["text"] or self._corpus.tokenizer.is_exact,
            num_without_prompt=self._kinds["no prompt"],
            num_incomplete=self._kinds["incomplete"],
        )

    def _builder_of(self, block_size: int | None) -> PageTraceBuilder:
        if self._builder is None:
            size = self._asked or block_size or DEFAULT_PAGE_SIZE
            self._builder = PageTraceBuilder(size)
        page_size = self._builder.page_size
        if block_size and self._asked is None and self._kinds["text"]:
            raise ConfigError(
                f"the log has texts before hashes of blocks of {block_size} tokens; set a page size "
                f"for both, a multiple of {block_size} (--page-size {block_size})"
            )
        if block_size and page_size % block_size:
            raise ConfigError(
                f"page_size={page_size} but the trace has hashes of blocks of {block_size} tokens; "
                f"use a multiple of {block_size}"
            )
        return self._builder

    def _add_hashed(self, request: LoggedRequest, hashed: HashedPrompt) -> None:
        builder = self._builder_of(hashed.block_size)
        blocks_per_page = builder.page_size // hashed.block_size
        num_pages = min(
            hashed.num_tokens // builder.page_size, len(hashed.block_ids) // blocks_per_page
        )
        keys = hashed.block_ids[blocks_per_page - 1 :: blocks_per_page][:num_pages]
        num_output = request.usage.num_output
        builder.add(
            keys,
            num_tokens=hashed.num_tokens,
            scope=("hashed", request.cache_scope, request.model),
            num_fresh_pages=self._num_fresh(hashed.num_tokens, num_pages, num_output),
            num_output=num_output,
            start_s=request.start_s,
            session=_session_of(request),
        )

    def _add_text(self, request: LoggedRequest, settings: list[int], prompt: list[int]) -> None:
        builder = self._builder_of(None)
        tokens = self._tokens(prompt)
        num_tokens, num_output = len(tokens), request.usage.num_output
        num_lookup, num_fresh = num_tokens // builder.page_size, 0
        if self._insert_outputs and request.output:
            answer = self._tokens(map(self._corpus.unit_of, request.output))
            tokens = np.concatenate([tokens, answer])
            num_output = len(answer) if num_output is None else num_output
        else:
            num_fresh = self._num_fresh(num_tokens, num_lookup, num_output)
        hashes = self._corpus.hasher.prefix_hashes(tokens)[builder.page_size :: builder.page_size]
        builder.add(
            hashes.view(np.int64).tolist(),
            num_tokens=num_tokens,
            scope=(request.cache_scope, *settings),  # they change the prompt from its start on
            num_lookup_pages=num_lookup,
            num_fresh_pages=num_fresh,
            num_output=num_output,
            start_s=request.start_s,
            session=_session_of(request),
        )
        self._kinds["text"] += 1
        self._kinds["incomplete"] += not request.has_full_text

    def _num_fresh(self, num_tokens: int, num_pages: int, num_output: int | None) -> int:
        """Pages that an answer of unknown text fills."""
        if not self._insert_outputs or not num_output or self._builder is None:
            return 0
        return max(0, (num_tokens + num_output) // self._builder.page_size - num_pages)

    def _tokens(self, units: Iterable[int]) -> Tokens:
        parts = [self._corpus.tokens(unit) for unit in units]
        return np.concatenate(parts) if parts else np.zeros(0, np.uint64)


def _session_of(request: LoggedRequest) -> Hashable:
    """Its conversation, which is one of its file and cache scope; None: it is not logged."""
    return None if request.conversation is None else (request.cache_scope, request.conversation)
