"""OpenAI's API: chat completions, completions, responses.

- `protocol`: request types. `options`: sampling, response format and cache options, diagnostics.
- `chat_request`, `chat_response`: to a `GenerationRequest`, and from a `Generation` to JSON.
- `completions`: both directions for plain prompts.
- `responses_protocol`, `responses_request`, `responses_response`: the Responses API, translated to
  and from chat.
- `endpoints`, `responses_endpoints`: the handlers of the routes.

Read in this order. `routes` and `operations.cache_admin` import it; `anthropic.protocol` takes scalar
types from `protocol`.
"""
