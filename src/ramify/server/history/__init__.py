"""Earlier requests and conversations, and why a prompt missed the cache.

In reading order:

- `request_history`: recent prompts by response id, and the first difference between two of them.
- `cache_miss`: the reason for a miss, as the client gets it.
- `conversation_store`: the items of `/v1/conversations`.

`generation`, `service` and the APIs import it. It imports `prompts` only.
"""
