"""A checkpoint directory, or a GGUF file, and its tensors.

In reading order:

- `find`: the directory or GGUF file of a name: local, built in, or a hub snapshot.
- `packaged`: names of models that are Python packages, and their files.
- `weight_source`: what every form of file is read as: weights by name, one at a time.
- `sources`: the source of a checkpoint directory, or of a GGUF file, which `gguf_source` reads.
- `safetensors_files`: which files there are, and the names in them.
- `stored_tensor`: a tensor of a file, by plain reads.
- `tensors`: their tensors, checked as a whole, read one at a time.
- `tensor_names`: what a tensor in a file is to the model; `packed_layers`: quantised linear layers.
- `stacked_experts`: experts that are stacked in one tensor, one by one.
- `weight_layout`: rows in the order that the operations expect.
"""
