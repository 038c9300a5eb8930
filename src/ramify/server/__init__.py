"""The HTTP server: OpenAI's, Anthropic's and Ollama's APIs over one engine. Only `cli` imports it.

A request goes through `app` (keys, errors, disconnects) → `routes` (the table of endpoints) →
`openai.endpoints`, `anthropic.endpoints` or `ollama.endpoints` → `*_request` (typed body to `Conversation`) →
`conversation` (from there to `GenerationRequest`, the same for all APIs) →
`service` (quotas, pins, history; starts it in the engine) → `generation` (one request in flight: its
events, answers and cache usage) → `*_response` (JSON, server-sent events or lines). Read in this order.

- `context`: `RequestContext`, which every endpoint gets. `model_list`: the endpoints of `/v1/models`.
- `prefixes`: `/v1/prefixes`, the beginnings of conversations under a name.
- `prompts`: chat templates, token ids, threads for both. `grammars`, `answers`: of answers, and their parts.
- `history`: earlier requests, conversations, reasons for misses. `request_fields`: request fields of several APIs.
- `model_dialects`: reasoning and tool calls in the text of each model family.
- `tenants`, `errors`, `health`: keys and quotas; error responses; liveness and readiness.
- `http`: wire format and uvicorn. `operations`: cache administration, metrics, loads, logs.
- `telemetry`: traces and metrics for an OpenTelemetry collector.
- `batches`: files and batches, whose lines go through the same handlers.
- `replicas`: what a cluster shows of its engines. `kv_events`: what is cached, for other people's routers.
- `run`: all of it put together for `ramify serve`.
"""
