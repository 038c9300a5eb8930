"""Earlier requests and conversations, and why a prompt missed the cache.

In reading order:

- `expiring_store`: `ExpiringStore`, which holds the two below: bounded in number, bytes and age.
- `named_values`: `NamedValues`, which holds named prefixes: bounded in number and bytes, refuses beyond.
- `stored_requests`: `HistoryEntry`, a recent request; the first difference between two of them.
- `stored_conversation`: `StoredConversation`, the items of a conversation of `/v1/conversations`.
- `cache_miss`: the reason for a miss, as the client gets it.

`generation`, `service`, `conversation` and the APIs import it. It imports `prompts` only.
"""
