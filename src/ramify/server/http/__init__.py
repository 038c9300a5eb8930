"""HTTP below the endpoints, for the whole server. Imports only `errors` and `health`.

- `browser_guard`: Host, Origin and forms of web pages.
- `json_limits`, `body_budget`: how large bodies may be, each and together.
- `wire`: read and decode bodies, encode JSON and server-sent events, error responses, pings.
- `uvicorn_server`: timeouts for slow clients, draining shutdown. Only `run` needs it.
"""
