"""HTTP below the endpoints, for the whole server. Imports only `errors` and `health`.

- `browser_guard`: Host, Origin and forms of web pages.
- `json_limits`, `body_budget`: how large bodies may be, each and together.
- `request_body`: decode bodies to typed values.
- `wire`: read bodies, encode JSON and server-sent events, error responses, pings.
- `connection_limit`, `acceptor`: how many clients may be connected; accept them.
- `strict_connection`: refuse requests whose length can be read in two ways.
- `listen_address`: sockets, bound before the model loads. `uvicorn_server`: timeouts for slow clients,
  draining shutdown. Only `run` needs them.
"""
