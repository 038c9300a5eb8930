"""Simulate a prefix cache of finite capacity on a log: hit rates by capacity, policy and lifetime.

1. `calls` has `simulate`, the whole as a call. `capacities` and `kv_bytes` read its options.
2. `sources` turns requests into the page ids of a `page_trace`.
3. `run` computes everything from the trace; `results` is what it returns.
4. `curves` need no cache: LRU at every capacity, Belady's bound, lifetimes.
5. `replays` run the real `PrefixCache`, and the real engine with the cost of its steps.
"""
