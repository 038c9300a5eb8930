#!/bin/sh
# On a CUDA device: the GPU tests, then the figures of benchmarks/gpu_check.py and gpu_attention.py.
# On none: the same kernels in Triton's interpreter, and compiled for GPUs that are not there.
#
#   gpu_check.sh PYTHON [arguments of benchmarks/gpu_check.py]
set -eu
python=$1
shift
if "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    tests=0
    "$python" -m pytest tests/gpu || tests=$?
    "$python" benchmarks/gpu_check.py "$@"
    "$python" benchmarks/gpu_attention.py --json gpu-attention.json
    exit "$tests"  # the figures are measured whether or not a test failed
fi
echo "no CUDA device: the kernels run in Triton's interpreter, and are compiled, but nothing is measured"
exec "$python" -m pytest -m "" tests/pure/test_triton_partition.py tests/cpu/test_triton*.py \
    tests/cpu/test_parity_grid.py tests/cpu/test_mla.py tests/cpu/test_gpu_check.py
