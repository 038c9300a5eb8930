"""Which requests go on behind the step in flight, and which ones its result decides about."""

from __future__ import annotations

from collections.abc import Iterable

from ramify.engine.request import Request


def needs_sampled_token(request: Request) -> bool:
    """Whether the step after the one that samples a token can only be planned with that token.

    Stop tokens and stop strings need none: the request ends one step late, and what that step
    computed is dropped.
    """
    processor = request.logits_processor
    if processor is not None and processor.reads_output:  # grammar, penalties, banned sequences
        return True
    return bool(request.pending_children)  # they are forked from what is committed


def ends_with_next_token(request: Request) -> bool:
    """Whether the next token is the last one, whichever it is."""
    num_tokens = len(request.prompt_ids) + len(request.output_ids) + 1
    return request.params.max_tokens == 0 or num_tokens >= request.max_len


def select_ahead(running: Iterable[Request]) -> list[Request]:
    """The running requests that compute one more token, whatever the step in flight samples.

    Returns:
        None of them if one needs the result: it has more of its prompt to compute, drafts, or
        `needs_sampled_token`. Neither if one pauses before the last token of its prompt: a step that
        ends a prompt may begin children, score prompt tokens or make an embedding.
    """
    requests: list[Request] = []
    for request in running:
        sequence = request.sequence
        is_planned = bool(sequence.num_planned)
        num_left = len(sequence.tokens) - sequence.num_computed - sequence.num_planned
        if num_left != (not is_planned) or request.draft:
            return []
        if not is_planned:  # it pauses in the step in flight
            if not request.output_ids:
                return []
            requests.append(request)
        elif needs_sampled_token(request):
            return []
        elif not ends_with_next_token(request):
            requests.append(request)
    return requests
