#!/bin/sh
# Install the cache cores that `make bench-core` compares with, and compile Ramify's own.
#
#   [TORCH_ARGS=...] install_core_peers.sh FOLDER
#
# FOLDER becomes an environment of its own. numpy is required; a peer that cannot be installed is left
# out, and the benchmark's table says why. Nothing happens where the inputs are as they were.
set -eu
folder=$1
python=$folder/bin/python
pip="$python -m pip --disable-pip-version-check --no-input"
torch=$(sed -n 's/^torch==/torch==/p' constraints.txt)

# The path and a checksum of the files named.
state_of() { { pwd; cat "$@"; } | cksum; }

peers=$(state_of pyproject.toml constraints.txt benchmarks/peers.txt benchmarks/core/fetch.py)
if [ "$(cat "$folder/.stamp" 2>/dev/null)" != "$peers" ]; then
    rm -f "$folder/.stamp"
    echo "[1/3] environment of the peers"
    sh scripts/make_venv.sh "$folder"
    echo "[2/3] installing numpy, $torch and what the peers import"
    $pip install -c constraints.txt numpy
    # TORCH_ARGS is several words.
    # shellcheck disable=SC2086
    $pip install -c constraints.txt ${TORCH_ARGS:-} "$torch" || echo "no torch: its peers will be absent"
    $pip install -c constraints.txt -r benchmarks/peers.txt || echo "some peers will be absent"
    echo "[3/3] unpacking the peers' wheels"
    "$python" benchmarks/core/fetch.py "$folder/peers"
    echo "$peers" >"$folder/.stamp"
fi

# The cache core compiled by mypyc, as a wheel has it. Without a C compiler its rows are absent.
native=$(state_of hatch_build.py src/ramify/cache/*.py)
if [ "$(cat "$folder/.stamp-native" 2>/dev/null)" != "$native" ]; then
    echo "compiling the cache core: a minute or so"
    rm -rf build/bench-core "$folder/peers/ramify-native"
    if RAMIFY_WHEEL_KERNELS=0 $pip -q wheel --no-deps -w build/bench-core . &&
        "$python" -m zipfile -e build/bench-core/*.whl "$folder/peers/ramify-native"; then
        echo "$native" >"$folder/.stamp-native"
    else
        echo "no wheel: the rows of the compiled core will be absent"
    fi
    rm -rf build/bench-core
fi
