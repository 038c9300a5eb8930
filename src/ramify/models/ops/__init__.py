"""Operations of a decoder: the interface between model families and devices, and its implementations.

Families import `protocol` and `mlp`; nothing here imports a family. Read in this order:

- `protocol`: what a family binds and calls, and the step that it gets.
- `registry`: the implementations, and the choice of one with its reasons.
- `torch_ops`: `TorchOps`, plain torch; the reference of the others.
- `layer_loop`, `mlp`, `functional`, `torch_modules`, `routing`: its parts.
- `probe`: keep an operation batched if its rows are independent, else run it row by row.
- `torch_linear`, `quantized`: strategies for x @ weight.T, and weights that are integer codes.
- `cpu_ops`: `CpuOps`, compiled CPU kernels where there is one.
- `cpu_linear`, `cpu_norm`, `cpu_rope`, `cpu_experts`: packed GEMM, norms, QK norm + rope and experts,
  alone or as ops of an op list.
- `cpu_layers`, `cpu_layer_ops`: op list of all layers, run as one compiled call or layer by layer.
- `cpu_layer_attention`: arguments for attention inside that call.
"""
