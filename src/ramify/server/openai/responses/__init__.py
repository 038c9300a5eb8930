"""The Responses API over chat completions: items in, items out, stored turns.

- `protocol`: request types.
- `tools`, `input`, `request`: tools, items and a request to those of chat; `truncation` of old turns.
- `calls`, `custom_input`, `items`, `response`: an answer to calls, items, events and a body.
- `store`, `replay`, `compaction`: stored responses, their events again, summaries.
- `endpoints`, `conversations`: the handlers of the routes.

Read in this order. `routes`, `operations.cache_admin` and `openai.unserved` import it.
"""
