"""Operations of a decoder: torch reference, compiled CPU kernels, and the probe that chooses.

Imported by model families and their builders; imports no family. Read in this order:

- `protocol`: types of attention and row functions.
- `functional`: norms, activation, rope, per-head matmul in torch.
- `probe`: keep an operation batched if its rows are independent, else run it row by row.
- `torch_linear`: strategies for x @ weight.T and the choice of one.
- `cpu_linear`, `cpu_rope`: packed GEMM and QK norm + rope, alone or as ops of an op list.
- `cpu_layers`: op list of all layers, run as one compiled call or layer by layer.
- `cpu_layer_attention`: arguments for attention inside that call.
"""
