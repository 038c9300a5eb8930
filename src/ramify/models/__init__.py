"""Decoders: configuration, layers, weights.

Below `engine`, which calls `loader.load_model` and runs a decoder's `forward` and `logits`; above
`attention` and `kernels`. Read in this order:

- `config`, `deepseek_config`, `config_fields`: config.json -> `ModelConfig`, without torch.
- `dense`, `deepseek`, `moe`: model families, what a layer computes.
- `builder`, `heads`, `rope`: weights -> operations of a family.
- `ops`: the operations: torch reference and compiled CPU kernels.
- `kv_cache_spec`: K/V planes and attention spec of a config.
- `loader`: checkpoint directory -> weights -> decoder.
"""
