"""Administration of the prefix cache, `llm.cache`: inspect, explain, pin, clear, warm, share.

In reading order:

    warmup      warm-up prompts from a file or a list; public prefixes: their token ids and pins
    view        `CacheView`: stats, tree, explain, pin, clear, warm, share
    branch_view a part of the tree at a time, for charts, as a tenant may see it
    drawing     the tree as lines of text
    calls       the same calls as values, to be run in the engine thread
    async_view  `AsyncCacheView`: the same calls as coroutines

`llm`, `async_llm`, `sessions` and the server import this package; it reads the core and its cache, and leaves
the computing of prompts to the callable that `llm` or `async_llm` passes in.
"""
