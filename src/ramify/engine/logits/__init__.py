"""What changes a request's logits before a token is drawn; numpy, no torch.

In reading order:

    logits_processors  `LogitsProcessor` of a request makes a `LogitsTransform` for each step: bias,
                       penalties, allowed tokens, min_tokens, grammar bitmask
    grammar            structured output: compiles grammars with llguidance
    grammar_cache      compiled grammars of each tenant, and whose turn it is to compile
    grammar_matcher    follows one answer in its grammar
    triggered_matcher  the same for an answer that is free text until a trigger, as before a tool call

The scheduler's side makes transforms and puts them into a `StepPlan`; the sampler (in `execution`)
applies them. Imports nothing else of the engine.
"""
