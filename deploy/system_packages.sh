#!/usr/bin/env bash
# Installs the system packages that Tandem needs and this machine lacks, where it may (root or passwordless sudo, apt).
# Where it may not, it prints the line to run and goes on: only the parts that need them will say so later.
#   libibverbs1 libnuma1 libcurl4   Mooncake's shared libraries
#   gcc libc6-dev                   the C attention kernel, compiled at first start
#   python3-venv                    `python3 -m venv` on Debian's own Python
# With the argument "tests" also what only those need:
#   chromium                        shows the dashboard to them
set -euo pipefail

missing=()

PATH=$PATH:/sbin:/usr/sbin
libraries=$(ldconfig -p 2>/dev/null || true)

need_library() { [[ $libraries == *"$1"* ]] || missing+=("$2"); }

need_library libibverbs.so.1 libibverbs1
need_library libnuma.so.1 libnuma1
need_library libcurl.so.4 libcurl4
command -v gcc >/dev/null || command -v cc >/dev/null || missing+=(gcc)
[ -e /usr/include/stdlib.h ] || missing+=(libc6-dev)
python3 -c 'import ensurepip' 2>/dev/null || missing+=(python3-venv)
[ "${1:-}" != tests ] || [ -x /usr/bin/chromium ] || missing+=(chromium)

[ ${#missing[@]} -eq 0 ] && exit 0

line="apt-get install -y --no-install-recommends ${missing[*]}"
if ! command -v apt-get >/dev/null; then
    echo "tandem: this machine lacks (Debian's names): ${missing[*]}; install them with its package manager" >&2
elif [ "$(id -u)" = 0 ]; then
    root=()
elif command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
    root=(sudo -n)
else
    echo "tandem: missing system packages; run: sudo $line" >&2
fi

[ -v root ] || exit 0
export DEBIAN_FRONTEND=noninteractive
if ! { "${root[@]}" apt-get update -qq && "${root[@]}" $line -qq; }; then
    echo "tandem: could not install them; run: sudo $line" >&2
fi
