"""GGUF files: a model's metadata and tensors. Only `blocks` needs torch.

In reading order:

- `tensor_types`: types by number, with the sizes of their blocks.
- `container`: the header, each bound checked against the file's size; rows of tensors.
- `metadata`: typed reads of keys; refuses keys that nobody read.
- `architectures`: a row for each `general.architecture`: its family, and what converters change.
- `config`: metadata -> the fields of `config.json` and `generation_config.json`.
- `names`: names of the model's tensors -> rows of the file's, and what has to be undone.
- `blocks`: bytes of rows -> quantised weights. `checkpoint/gguf_source.py` reads weights with it.
"""
