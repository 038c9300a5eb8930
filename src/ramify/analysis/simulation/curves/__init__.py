"""Hit rates computed from reuse alone, without a cache.

`reuse` finds which request used each page last. From it, `stack_distances` has LRU at every capacity,
`bounds` Belady's MIN and the hit rate by lifetime.
"""
