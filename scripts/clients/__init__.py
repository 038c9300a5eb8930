"""Clients that nobody here wrote, against a running server: `make clients`.

`runner` installs each client in an environment of its own and starts two servers, `scripted_server`
is the second of them, `report` is what a file of `cases/` prints its results with. A file of `cases/`
runs in its client's environment, which has neither Ramify nor torch unless the client brings it.
"""
