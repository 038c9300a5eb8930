"""Named prefixes: `/v1/prefixes`, where clients keep the beginnings of their conversations.

In reading order:

- `definition`: from the body, in the shape of any API, to a `NamedPrefix` with the tokens of every prompt that it begins.
- `pages`: compute a prefix at every engine and pin it there; end its pins.
- `endpoints`: the handlers.

How a request uses a name: `conversation.named_prefix`. `routes` and `operations.weights` import this room; it
imports the readers of the APIs.
"""
