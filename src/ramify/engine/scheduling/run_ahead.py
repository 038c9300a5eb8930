"""Which requests go on behind the step in flight, and which of them its result decides about."""

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


def is_read(request: Request) -> bool:
    """Whether more comes of its prompt than K/V and one token: scores, an embedding, children."""
    params = request.params
    scores = params.prompt_logprobs is not None or params.prompt_embedding
    return scores or bool(request.pending_children)


def select_ahead(running: Iterable[Request]) -> tuple[list[Request], list[Request]] | None:
    """The running requests that go on, whatever the step in flight samples: by a token, and by a chunk.

    Returns:
        None if one needs the result: it has drafts, `needs_sampled_token`, or its prompt `is_read`.
    """
    decodes: list[Request] = []
    prompts: list[Request] = []
    for request in running:
        sequence = request.sequence
        num_tokens = len(sequence.tokens)
        num_left = num_tokens - sequence.num_computed - sequence.num_planned
        if request.draft:
            return None
        if not num_left:  # the step in flight samples its next token
            is_plain = request.logits_processor is None and not request.children
            if not is_plain and needs_sampled_token(request):
                return None
            if num_tokens + 1 < request.max_len:  # that token is not the last, whichever it is
                decodes.append(request)
        elif num_left == 1 and request.output_ids:  # it pauses in the step in flight
            decodes.append(request)
        elif is_read(request):
            return None
        else:
            prompts.append(request)
    return decodes, prompts
