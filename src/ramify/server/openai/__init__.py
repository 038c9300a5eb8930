"""OpenAI's API: chat completions, completions, responses, embeddings.

- `protocol`: request types. `options`, `answer_formats`: sampling, cache options, response formats.
  `unsupported`, `vllm_fields`: fields that are refused, and response fields of vLLM.
- `chat_request`, `messages`: a request to a `Conversation`. `chat_response`: a `Generation` to JSON.
- `completions` (with `completion_logprobs`), `embeddings`: both directions for plain prompts, and for
  vectors of texts.
- `responses`: the Responses API, and conversations.
- `endpoints`: the handlers of the routes.

Read in this order. `routes` and `operations.cache_admin` import it. `anthropic.protocol`
takes scalar types from `openai.protocol`, `anthropic.endpoints` checks fields with `openai.unsupported`;
`ollama` takes scalar types, plain prompts and embeddings.
"""
