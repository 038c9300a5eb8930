"""The processes of tensor parallelism: one for each rank, of which rank 0 is the engine's own.

- `rank_spec`: what a rank is, and what it makes of that.
- `rank_process`: the process of a rank other than 0.
- `rank_processes`: starts them, sends orders to them, notices that one has gone.
- `rank_runner`: the runner of every rank, and that of rank 0, which orders the others to do the same.

Rank 0 schedules, plans and samples, as an engine of one rank does. All ranks have the same hidden rows,
so sampling on each would compute the same tokens again, and grammars and generators would have to agree.
Orders are sent by the runner, not by the executor: what only rank 0 sees, such as a row that is not
finite, then cannot make two ranks take different ways.
"""
