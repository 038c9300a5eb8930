"""Anthropic's Messages API.

`protocol` has the request types, `messages_request` makes a `GenerationRequest` of a request, and
`messages_response` makes the message or its events of a `Generation`. Read in this order. Only `app`,
the route table and `operations.cache_admin` import it.
"""
