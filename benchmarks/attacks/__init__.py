"""Attacks of one tenant on the others, against a server of their own: see `attack.py`.

- `server`: the server that is attacked, and requests to it.
- `load`: attacks that take time or room; another tenant's latency is measured meanwhile.
- `checks`: what is looked at without load: the format oracle, browsers, redirects.
"""
