"""The Responses API: items in, items out, stored turns.

- `protocol`: request types.
- `tools`, `input`: tools and items to those of chat; `request`: a request to a `Conversation`;
  `truncation` of old turns.
- `calls`, `custom_input`, `items`, `response`: an answer to calls, items, events and a body.
- `store`, `replay`, `compaction`: stored responses, their events again, summaries.
- `endpoints`, `conversations`: the handlers of the routes.

Read in this order. `routes`, `operations.cache_admin` and `openai.unsupported` import it.
"""
