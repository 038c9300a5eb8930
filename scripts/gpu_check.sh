#!/bin/sh
# Run the GPU tests and benchmark; without a CUDA device, the same kernels in Triton's interpreter.
#
#   gpu_check.sh PYTHON [benchmark arguments]
set -eu
python=$1
shift
if "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    "$python" -m pytest tests/gpu
    exec "$python" benchmarks/gpu_attention.py --json gpu-attention.json "$@"
fi
echo "no CUDA device: the kernels run in Triton's interpreter instead"
exec "$python" -m pytest tests/pure/test_triton_partition.py tests/cpu/test_triton.py tests/cpu/test_parity_grid.py \
    tests/cpu/test_triton_compiles.py
