"""OpenAI's API: chat completions, completions, responses.

- `protocol`: request types. `options`: sampling, response format and cache options, diagnostics.
- `chat_request`, `chat_response`: to a `GenerationRequest`, and from a `Generation` to JSON.
- `completions`: both directions for plain prompts.
- `responses_protocol`: types of the Responses API. `responses_tools`, `responses_input`,
  `responses_request`: tools, items and requests to those of chat; `responses_truncation`.
- `responses_calls`, `responses_items`, `responses_response`: an answer to items, events and a body.
- `responses_store`, `responses_replay`, `compaction`: stored responses, their events again, summaries.
- `endpoints`, `responses_endpoints`, `conversations`: the handlers of the routes.

Read in this order. `routes` and `operations.cache_admin` import it; `anthropic.protocol` takes scalar
types from `protocol`.
"""
