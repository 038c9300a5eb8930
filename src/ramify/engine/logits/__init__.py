"""Logits processors and grammars: change the logits of a request before a token is sampled. NumPy, no torch.

In reading order:

    logits_processors  `LogitsProcessor` of a request makes a `LogitsTransform` for each step: bias,
                       penalties, allowed tokens, min_tokens, grammar bitmask
    banned_sequences   tokens that would complete a banned sequence
    grammar            structured output: compiles grammars with llguidance
    grammar_cache      compiled grammars of each tenant, permits to compile
    grammar_matcher    follows one answer in its grammar
    triggered_matcher  the same for an answer that is free text until a trigger, as before a tool call

The scheduler's side makes transforms and puts them into a `StepPlan`; the sampler (in `execution`)
applies them. Imports nothing else of the engine.
"""
