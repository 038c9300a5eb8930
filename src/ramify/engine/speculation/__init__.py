"""Speculative decoding: draft tokens for running requests, verified by the next step.

- `drafter`: the `Drafter` protocol that the core calls; proposers; how long a draft is worth it
- `ngram`: the n-gram index behind prompt-lookup decoding

To add a proposer, write a class with `propose(request, limit)` in a file of its own and add it to
`create_drafter`. For `engine.core` only. The sampler accepts or rejects the drafts
(`engine.execution.sampler`).
"""
