"""Stores of K/V pages outside the pool: host memory, disk, a server. No torch, no cache, no engine.

A store maps the hash of a page to the page's bytes. It may lose any page at any time and never returns
a wrong one. Read in this order:

- `page_store`: `PageStore`, the protocol, and the outcomes of its calls.
- `memory`: pages in one block of host memory, and the faults that tests inject.
"""
