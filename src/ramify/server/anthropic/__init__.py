"""Anthropic's Messages API.

`protocol` has the request types, `messages_request` (with `history`, `blocks`, `tools`) makes a `GenerationRequest` of a request,
`messages_response` makes the message or its events of a `Generation`, and `endpoints` are the handlers
of the routes. Read in this order. Only `routes`, `app`, `model_list` and `operations.cache_admin` import it.
"""
