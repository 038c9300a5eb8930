"""Many engines behind one server.

- `page_index`: which caches have a page
- `mirrors`: what each replica has cached, from its events
- `prefixes_in_flight`, `decisions`, `router`: which replica serves a prompt, and why

They load neither torch nor gRPC.
"""
