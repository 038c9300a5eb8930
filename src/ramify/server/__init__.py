"""HTTP server: OpenAI's and Anthropic's APIs over one engine.

A request's way: `app` -> `routes` -> `endpoints` of its API -> `*_request` (typed body to
`GenerationRequest`) -> `service` -> engine -> `generation` (events, cache usage) -> `*_response`
(events to JSON). `context` holds what belongs to one HTTP request.

- `http`: bodies, JSON, server-sent events, uvicorn. Knows nothing of the modules below.
- `prompt_renderer`, `tool_calls`, `request_history`, `cache_miss`, `tenants`, `errors`: what both APIs
  share; they import neither of them.
- `generation`, `service`: one request in flight; the engine with quotas, pins and history.
- `openai`, `anthropic`: one package for each API. `anthropic.protocol` takes scalar types from
  `openai.protocol`; nothing else crosses.
- `operations`: health, metrics, logs, cache administration.

Only `cli` imports this package. Read `app`, `service`, `generation`, then `openai.chat_request`.
"""
