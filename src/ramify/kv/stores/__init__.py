"""Stores of K/V pages outside the pool: host memory, disk, a server. No torch, no cache, no engine.

A store maps the hash of a page to the page's bytes. It may lose any page at any time and never returns
a wrong one. Read in this order:

- `page_store`: `PageStore`, the protocol, and the outcomes of its calls.
- `memory`: pages in one block of host memory, and the faults that tests inject.
- `segments`: `SegmentStore`, pages in segment files on disk; joins what follows.
- `segment_options`, `segment_listing`: its options; what a start finds on disk.
- `segment_format`: preamble, record, footer: encode and decode alone.
- `payload_codec`: a record's payload, with a checksum or encrypted.
- `page_names`: keyed hashes under which pages are stored.
- `page_index`, `segment_table`: where each page is; hits, errors and figures.
- `segment`, `segment_reader`, `segment_writer`: one file; reads; appends, fsync, budget and eviction.
- `segment_follower`: what a read-only store does to see what the writer adds.
- `removal_log`: pages that no restart may bring back.
- `store_directory`: lock, identity and key of a directory.
- `store_identity`: all that the bytes of a page depend on beside its tokens.
- `valkey`: `ValkeyStore`, pages in a Valkey or Redis server; joins what follows.
- `valkey_link`, `valkey_settings`: pipelines that end by a deadline; what a server's settings mean.
- `valkey_tls`: options of TLS, and its errors in words.
- `circuit_breaker`: leaves a server alone that fails.
- `file_ops`: every system call on files, so that tests can make each of them fail.
"""
