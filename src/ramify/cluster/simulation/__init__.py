"""A fleet in virtual time: which replica serves a log's requests, what hits there, how long they wait.

- `replicas`: a replica's cache, queue and batch, with a clock
- `rules`: how requests are routed: by the router of this package, and as other routers do
- `fleet`: serves a trace with a rule
- `traffic`: generated conversations and agents
"""
