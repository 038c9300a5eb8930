"""Speculative decoding: draft tokens for running requests, verified by the next step.

Read `drafter` (the `Drafter` protocol that the core calls, proposers, draft lengths), then `ngram`
(the index behind prompt-lookup decoding).

To add a proposer, write a class with `propose(request, limit)` in a file of its own and add it to
`create_drafter`. `engine.core` and `engine.result_processor` import it. The sampler accepts or rejects the
drafts (`engine.execution.sampler`).
"""
