"""The HTTP server: OpenAI's and Anthropic's APIs over one engine. Only `cli` imports it.

A request goes through `app` (keys, errors, disconnects) → `routes` (the table of endpoints) →
`openai.endpoints` or `anthropic.endpoints` → `*_request` (typed body to `GenerationRequest`) →
`service` (quotas, pins, history; starts it in the engine) → `generation` (one request in flight: its
events, answers and cache usage) → `*_response` (JSON or server-sent events). Read in this order.

- `context`: `RequestContext`, which every endpoint gets.
- `prompt_renderer`, `output_formats`, `answer_opening`, `answer_constraint`, `request_history`,
  `cache_miss`: shared by all APIs. `template_conventions`, `template_probes`: what a chat template reads.
- `answer`, `generation`: an answer in parts, one request in flight. `reasoning_options`,
  `tool_schemas`, `schema_keywords`, `unserved_fields`, `content_placeholders`, `partial_json`,
  `opaque_text`, `model_list`: forms that the APIs share.
- `prompt_jobs`, `conversation_store`: work before the engine, stored conversations.
- `tenants`, `errors`, `health`: keys and quotas; error responses; liveness and readiness.
- `http`: wire format and uvicorn. `operations`: cache administration, metrics, logs.
- `run`: all of it put together for `ramify serve`.
"""
