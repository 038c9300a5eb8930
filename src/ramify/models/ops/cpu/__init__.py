"""`CpuOps`: the operations of `TorchOps` by compiled CPU kernels.

In reading order:

- `cpu_ops`: binds an operation to its kernel, or to torch where there is none.
- `linear`, `norm`, `rope`, `experts`: packed GEMM, norms, QK norm + rope and experts, alone or as ops
  of an op list.
- `embedding`: token embeddings, also from a packed LM head.
- `layer_ops`, `layers`: op list of all layers, run as one compiled call or layer by layer.
- `layer_attention`: arguments for attention inside that call.
"""
