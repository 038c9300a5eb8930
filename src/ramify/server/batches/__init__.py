"""Files and batches: OpenAI's `/v1/files` and `/v1/batches`, Anthropic's `/v1/messages/batches`.

`endpoints`, `file_endpoints`, `anthropic_endpoints` → `batches` → `runner` (all batches) → `batch_run` (one, from its
validation to its results) → `journal`, `plan` → `store`.

- `records`: what is remembered of a file and a batch; `store`: all records; `directory`: the disk below.
- `upload`: multipart forms, streamed to disk.
- `lines`, `anthropic_lines`: requests and results as each API writes them.
- `plan`: where the lines of an input are, checked; `prefix_order`: the order in which they run.
- `journal`: results, appended once for each line.
- `slots`: how many lines run at once, so that other requests go first.

A line is answered by `app.Server.answer_line`: by the handler that answers the same body over HTTP.
"""
