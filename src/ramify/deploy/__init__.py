"""A server and its engines on a Ray cluster: `ramify deploy`.

Ray places, starts, starts again, scales and replaces processes. Tokens travel between server and
engines as in any other cluster (`ramify.cluster`), never through Ray.

In reading order:

- `config`: the file that describes a deployment
- `scaling`: how many engines a load needs
- `ingress`: the server over replicas that come and go
- `engine_process`: an engine in a child process
- `end_signals`: the signals that end a deployment
- `ray_serve`: both as deployments of Ray Serve; the only file that imports Ray

Importing the package, or `config` or `scaling`, loads neither torch nor Ray.
"""
