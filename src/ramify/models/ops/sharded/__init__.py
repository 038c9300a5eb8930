"""Operations of one rank of tensor parallelism: parts of the weights, sums and gathers over all ranks.

- `rank_group`: the ranks, and the sums and gathers that they make together.
- `rank_weights`: the weights of a checkpoint, of which a rank reads its part.
- `sharded_ops`: `Ops` over the operations of a device.
"""
