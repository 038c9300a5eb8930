"""What a request of any API says, in one form, and its translation for the engine.

In reading order:

- `parts`: a message as parts: text, media, reasoning, calls, results.
- `conversation`: `Conversation`, the whole request.
- `moved_text`: prompt rules, which take changing text out of the system prompt.
- `named_prefix`: the conversation that a request with `prefix` stands for.
- `to_generation`: from a `Conversation` to the `GenerationRequest` that the engine gets.

Each API has a reader that makes a `Conversation`: `openai.chat_request`, `openai.responses.request`,
`anthropic.messages_request`, `ollama.chat_request`. `openai`, `anthropic`, `ollama` and `operations.cache_admin` import this room; it
imports `service` and the rooms below.
"""
