#!/bin/sh
# Create a virtual environment with pip in it; an environment that works is kept.
#
#   [PYTHON=...] make_venv.sh FOLDER
#
# Takes the first Python >= 3.11 that has pip. Debian's Python has no ensurepip unless python3-venv is
# installed; there, the pip of the system fills the environment instead.
set -eu
folder=$1
candidates=${PYTHON:-python3.11 python3.12 python3.13 python3}

# The activate script holds the path of the environment: a moved or copied checkout needs a new one.
if "$folder/bin/python" -m pip --version >/dev/null 2>&1 &&
    grep -qsF "$(pwd)/$folder" "$folder/bin/activate"; then
    echo "$folder is there: $("$folder/bin/python" --version)"
    exit 0
fi
for python in $candidates; do
    "$python" -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 || continue
    if "$python" -c 'import ensurepip' >/dev/null 2>&1; then
        echo "creating $folder with $("$python" --version)"
        exec "$python" -m venv --clear "$folder"
    fi
    if "$python" -m pip --version >/dev/null 2>&1; then
        echo "creating $folder with $("$python" --version), without ensurepip"
        "$python" -m venv --clear --without-pip "$folder"
        exec "$python" -m pip --disable-pip-version-check --python "$folder" install pip
    fi
done
echo "error: tried $candidates and found no Python >= 3.11 with pip." >&2
echo "  Install one (on Debian: python3 python3-venv python3-pip), or name one: make PYTHON=/path/to/python3" >&2
exit 1
