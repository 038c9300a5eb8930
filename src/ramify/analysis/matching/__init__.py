"""Which earlier request a request should have shared most with.

`best_match` finds candidates in indexes that grow linearly with the log, radix trees of the prompts
(`unit_tree`) among them, and compares each exactly. `hashed_matching` does it for logs of block hashes.
"""
