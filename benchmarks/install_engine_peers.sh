#!/bin/sh
# Install the engines that benchmarks compare with: minutes, and gigabytes for vLLM.
#
#   install_engine_peers.sh PYTHON FOLDER [NAME...]     openvino, llama, vllm; by default all three
#
# Each engine gets an environment of its own below FOLDER. An engine that cannot be installed leaves a
# note, and the benchmark's table repeats it. Nothing happens where install.py is as it was.
set -eu
python=$1 folder=$2
shift 2
[ $# -gt 0 ] || set -- openvino llama vllm
TORCH=$(sed -n 's/^torch==/torch==/p' constraints.txt)
export TORCH
mkdir -p "$folder"
for name in "$@"; do
    stamp=$folder/.stamp-$name
    [ -e "$stamp" ] && [ ! benchmarks/engines/install.py -nt "$stamp" ] && continue
    echo "[peers] $name"
    "$python" benchmarks/engines/install.py "$name" "$folder"
    touch "$stamp"
done
