"""K/V cache memory: block tables (NumPy, no torch) and paged tensors (torch).

Below `kernels` and `attention`, above `cache`; decides nothing about what is cached. Read in this order:

- `block_table`: the pages of each live request, in order.
- `layout`: K/V planes of a token, their shapes, reads and writes by slot.
- `pool`: the tensors of all pages, planes and layers.
- `quantize`: int8 and fp8 K/V, a scale for each token and head.
- `flat_slots`: block table -> flat slot indices, on the device.
- `page_bytes`: a page as one run of bytes.
- `offload`: the mover, threads that carry pages to and from `stores`.
- `huge_pages`: CPU tensors in 2 MB pages; weights use it too.
- `stores`: pages outside the pool: host memory, disk, a server (no torch).
"""
