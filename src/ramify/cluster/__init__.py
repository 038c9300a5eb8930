"""Many engines behind one server: replicas, each an `AsyncLLM` in its own process, and their client.

In reading order. Who decides knows no socket, no clock and no tensor:

- `page_index`: which caches have a page
- `mirrors`: what each replica has cached, from its events
- `prefixes_in_flight`, `prefix_home`, `recent_work`, `replica_work`: what the router knows besides
- `decisions`, `router`: which replica serves a prompt, and why
- `hot_prefixes`: what most prompts begin with
- `simulation`: a fleet in virtual time

What travels:

- `wire`: the messages between server and replica, their limits, and the hello
- `codecs`: parameters, errors and results of calls in a form that travels
- `credentials`: the secret or the certificates of a connection

The replica's side:

- `step_reports`: load and cache events, taken in the engine thread
- `connection`: one server at a replica, and its requests
- `replica`: the gRPC service over an `AsyncLLM`
- `run_replica`: its process

The server's side:

- `link`: one connection; `remote_replica`: a replica, through one connection after the other
- `remote_request`: a request, and what was delivered of it
- `routes`: the router and the mirrors as the client uses them
- `prompt_hashes`: page hashes of a prompt, for replicas of any weights
- `members`: the replicas, and the tasks that keep the client connected
- `merging`, `admin_calls`: calls about caches and pins that run on every replica, and their one result
- `parked_requests`, `tenant_shares`, `dispatch`: who computes which request, and what becomes of it when a
  replica dies or all are full
- `warm_up`: what a replica that joins computes first
- `rollout`: other weights for one replica after the other
- `client`: `ClusterLLM`, which takes the place of `AsyncLLM` under the server
- `view`: each replica by itself, for metrics, statistics and explanations
- `cpu_shares`, `local_child`, `local_processes`: replicas as children of the server
- `tier_shares`, `tier_claims`: a cache directory for each replica of a machine
- `launch`: opens a client over children, or over replicas elsewhere
- `inspection`: what replicas say of themselves

Importing the package, or anything of its first two parts, loads neither torch nor gRPC.
"""
