"""What an engine's cache holds, published for other people's routers: vLLM's events over ZeroMQ.

- `form`: events as msgpack, as vLLM and SGLang write them.
- `sockets`: the ZeroMQ sockets and their thread.
- `feed`: events of an engine, between two steps.
- `options`: what to publish where.
"""
