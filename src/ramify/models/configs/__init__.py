"""config.json -> `ModelConfig`. No torch.

In reading order:

- `checkpoint_files`: opens a checkpoint's files, within limits.
- `fields`: typed reads of a parsed JSON file.
- `dense_variant`, `rope`, `moe`: values that describe a layer; `rope` and `moe` also read their fields.
- `family`: what a row holds, fields that many families have, sliding windows.
- `families/`: a file for each family: its rows, and readers of its own fields; DeepSeek's has MLA too.
- `quantization/`: `quantization_config` -> a scheme for each linear layer.
- `model_config`: all of it -> `ModelConfig`.
- `wrappers`: the text decoder inside a checkpoint that also reads images or audio.
- `pooling`: files of sentence-transformers; `sampling_defaults`: `generation_config.json`.
"""
