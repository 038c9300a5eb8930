"""Decoders: configuration, layers, weights.

Below `engine`, which calls `loader.load_decoder` and runs a decoder's `forward` and `logits`; above
`attention` and `kernels`. In reading order; a room imports only rooms above it:

- `configs`: config.json -> `ModelConfig`; a row for each architecture. No torch.
- `checkpoint`: directory -> tensors by name.
- `ops`: the operations of a layer: torch reference and compiled CPU kernels.
- `decoders`: what a layer of each family computes.
- `hf`: any other architecture, through transformers.
- `kv_cache_spec`: K/V planes and attention spec of a config.
- `loader`: all of it -> decoder.
"""
