"""config.json -> `ModelConfig`. No torch.

In reading order:

- `checkpoint_files`: opens a checkpoint's files, within limits.
- `fields`: typed reads of a parsed JSON file.
- `dense_variant`, `rope`, `moe`: values that describe a layer; `rope` and `moe` also read their fields.
- `deepseek`: MLA, sparse index and experts of DeepSeek.
- `family_variants`, `family`, `families`: a row for each architecture, and readers of its own fields.
- `windows`: sliding windows.
- `model_config`: all of it -> `ModelConfig`.
- `wrappers`: the text decoder inside a checkpoint that also reads images or audio.
- `pooling`: files of sentence-transformers.
"""
