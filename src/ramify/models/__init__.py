"""Decoders: configuration, layers, weights.

Below `engine`, which calls `loader.load_decoder` and runs a decoder's `forward` and `logits`; above
`attention` and `kernels`. Read in this order:

- `config`, `config_fields`: config.json -> `ModelConfig`, without torch. `families`: a row for each
  architecture; `family`, `family_variants`, `dense_variant` are what a row says; `deepseek_config`,
  `moe_config`, `rope_config`, `window_config`, `pooling_config` read parts of the file.
- `decoder`, `dense`, `deepseek`, `moe`: what a layer computes. `rope`: frequencies and tables.
- `ops`: the operations: torch reference and compiled CPU kernels.
- `kv_cache_spec`: K/V planes and attention spec of a config.
- `find_checkpoint`, `checkpoint_tensors`, `stacked_experts`, `weight_layout`: directory -> weights.
- `loader`: all of it -> decoder.
- `wrappers`: the text decoder inside a checkpoint that also reads images or audio.
- `hf`, `hf_config`, `hf_checks`: any other architecture, through transformers.
"""
