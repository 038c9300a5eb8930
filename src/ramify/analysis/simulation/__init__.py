"""Simulate a prefix cache of finite capacity on a log: hit rates by capacity, policy and lifetime.

`page_trace` turns requests into the ids of their pages; `reuse` says for each page which request
used it last. From that, `stack_distances` has LRU at every capacity, `bounds` the best that any
policy and any capacity could do, `lifetimes` a cache with a time to live. `replay` runs the real
`PrefixCache`. `simulate` is all of it together.
"""
