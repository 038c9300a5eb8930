"""The caches that a replay goes through: each looks a prompt up, then writes and refreshes its entries.

Three kinds: `page_cache` (all whole steps up to the first difference; `page_pool` bounds its capacity),
`breakpoints` (entries where earlier prompts had a breakpoint), `segment_cache` (stored units, whole or
not at all). `analysis.prefix_index` finds the longest shared prefix.
"""
