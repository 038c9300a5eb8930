"""Building blocks by their known names, for learning and prototypes: see docs/building-blocks.md.

- `rotary`: rotary position embedding, `rotate_half` and `apply_rotary_pos_emb`.
- `attention_block`: `RadixAttentionBlock`, a Llama attention layer as an nn.Module.
- `paged_kv_cache`: `RadixAttentionWithPagedKVCache`, a paged K/V cache without sharing.

The engine uses none of them; `ramify` resolves their names on first use, for users and examples.
"""
