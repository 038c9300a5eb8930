"""Decoders of our own families, over the operations of `models.ops.protocol`.

In reading order:

- `decoder`: token embedding, layers, LM head.
- `moe`: router, experts and shared expert in place of an MLP.
- `dense`: the layer of the Llama family and its variants.
- `deepseek`: the layer with multi-head latent attention.
"""
