"""Simulate a prefix cache of finite capacity on a log: hit rates by capacity, policy and lifetime.

`page_trace` turns requests into the ids of their pages; `reuse` says for each page which request
used it last. From that, `stack_distances` has LRU at every capacity, `bounds` the best that any
policy could do at a capacity, and the hit rate by lifetime. `replay` runs the real `PrefixCache`.
`calls` has `simulate`, which is all of it together.
"""
