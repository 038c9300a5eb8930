"""Anthropic's Messages API.

- `protocol`: request types.
- `messages_request`, with `turns`, `blocks` and `tools`: a request to a `Conversation`.
- `messages_response`: a `Generation` to a message, or to the events of a stream.
- `endpoints`: the handlers of the routes.

Read in this order. Only `routes`, `app`, `model_list` and `operations.cache_admin` import it.
"""
