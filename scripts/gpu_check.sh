#!/bin/sh
# On a CUDA device: the GPU tests, then the figures of benchmarks/gpu_check.py and gpu_attention.py.
# On none: the same kernels in Triton's interpreter, and compiled for GPUs that are not there.
#
#   gpu_check.sh PYTHON [arguments of benchmarks/gpu_check.py]
#
# Everything runs, whatever failed before it. Status 1 if a test failed or a figure could not be measured;
# a goal that is missed is printed, and with --strict status 1, too.
set -eu
python=$1
shift
if "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    tests=0 figures=0 attention=0
    "$python" -m pytest tests/gpu || tests=$?
    "$python" benchmarks/gpu_check.py --tests-status "$tests" "$@" || figures=$?
    "$python" benchmarks/gpu_attention.py --json gpu-attention.json || attention=$?
    exit $((tests != 0 || figures != 0 || attention != 0))
fi
echo "no CUDA device: the kernels run in Triton's interpreter, and are compiled, but nothing is measured"
exec "$python" -m pytest -m "" tests/pure/test_triton_partition.py tests/cpu/test_triton*.py \
    tests/cpu/test_parity_grid.py tests/cpu/test_mla.py tests/cpu/test_gpu_check.py
