"""Many engines behind one server.

- `page_index`: which caches have a page
- `mirrors`: what each replica has cached, from its events

They load neither torch nor gRPC.
"""
