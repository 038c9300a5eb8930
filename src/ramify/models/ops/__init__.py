"""Operations of a decoder: the interface between model families and devices, and its implementations.

Families import `protocol` and `mlp`; nothing here imports a family. Read in this order:

- `protocol`: what a family binds and calls, and the step that it gets.
- `registry`: the implementations, and the choice of one with its reasons.
- `torch_ops`: `TorchOps`, plain torch; the reference of the others.
- `layer_loop`, `mlp`, `functional`, `torch_modules`, `routing`, `rotary_table`: its parts.
- `probe`: keep an operation batched if its rows are independent, else run it row by row.
- `torch_linear`, `quantized`: strategies for x @ weight.T, and weights that are integer codes.
- `weight_rounding`: matrices rounded to 8 or 4 bits at load.
- `triton_ops`: `TritonOps`, Triton's kernels on CUDA; norms, activations, rope, exact GEMMs.
- `cpu`: `CpuOps`, compiled CPU kernels where there is one.
"""
