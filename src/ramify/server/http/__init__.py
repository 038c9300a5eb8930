"""HTTP below the endpoints, for the whole server. Imports only `errors` and `health`.

- `wire`: read and decode bodies, encode JSON and server-sent events, error responses, pings.
- `uvicorn_server`: timeouts for slow clients, draining shutdown. Only `run` needs it.
"""
