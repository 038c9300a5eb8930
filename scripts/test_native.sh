#!/bin/sh
# Build a wheel whose cache core mypyc compiles, and run the tests of the cache on it.
#
#   test_native.sh PYTHON [pytest arguments]
set -eu
python=$1
shift
site=build/native/site

# The mutants replace functions, which compiled code does not notice.
tests=$(ls tests/pure/test_cache_*.py tests/pure/test_columns.py tests/pure/test_docs.py \
    tests/pure/test_engine_core.py tests/pure/test_eviction_queue.py tests/pure/test_hash_index.py \
    tests/pure/test_page*.py tests/pure/test_pin_machine.py tests/pure/test_planner*.py \
    tests/pure/test_polic*.py tests/pure/test_prefix_cache.py tests/pure/test_public_prefixes.py \
    tests/pure/test_sequence_*.py tests/pure/test_single_flight.py tests/cpu/test_bit_identity.py |
    grep -v '_mutants\.py$')

rm -rf build/native
mkdir -p build
RAMIFY_WHEEL_KERNELS=0 "$python" -m pip --disable-pip-version-check --no-input wheel -v --no-deps -w build/native . \
    >build/native.log 2>&1 || { cat build/native.log; exit 1; }
"$python" -m zipfile -e build/native/*.whl "$site"
if ! { command -v cc || command -v gcc || command -v clang; } >/dev/null; then
    echo "no C compiler: nothing to test"
    exit 0
fi
ls "$site"/ramify/cache/tree.*.so || { tail -n 40 build/native.log; exit 1; }
# shellcheck disable=SC2086
PYTHONPATH=$site exec "$python" -m pytest -n auto --dist loadfile $tests "$@"
