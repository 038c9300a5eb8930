"""The caches that a replay goes through: each looks a prompt up, then writes and refreshes its entries.

Three kinds: `grid` (all whole steps up to the first difference; `page_pool` bounds its capacity),
`breakpoints` (entries where earlier prompts had a breakpoint), `whole_units` (stored units, whole or not
at all). `prefix_index` finds the longest shared prefix, in a `prefix_table` of hashes.
"""
