"""Ollama's API: chat, generate, embeddings, the model that is served.

- `protocol`: request types, and the options of a model.
- `names`: model names with and without the tag `:latest`.
- `options`: sampling, format, thinking and cache options of a request.
- `chat_request`, `generate_request`: a request to a `Conversation`, or to a plain prompt.
- `response`: a `Generation` to JSON, whole or as lines.
- `embed`: vectors of texts.
- `checkpoint_facts`, `model_card`: what the model's files say of it, and what clients are shown.
- `endpoints`: the handlers of the routes.

Read in this order. Only `routes` and `operations.cache_admin` import it; it takes scalar types, plain
prompts and embeddings from `openai`.
"""
