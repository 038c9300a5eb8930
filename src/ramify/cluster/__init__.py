"""Many engines behind one server: replicas, each an `AsyncLLM` in its own process, and their client.

In reading order. Who decides knows no socket, no clock and no tensor:

- `page_index`: which caches have a page
- `mirrors`: what each replica has cached, from its events
- `prefixes_in_flight`, `decisions`, `router`: which replica serves a prompt, and why

What travels:

- `wire`: the messages between server and replica, their limits, and the hello
- `codecs`: parameters, errors and results of calls in a form that travels
- `credentials`: the secret or the certificates of a connection

Importing the package, or any of these, loads neither torch nor gRPC.
"""
