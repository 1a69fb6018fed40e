#!/usr/bin/env bash
# Installs the system packages that Tandem needs and this machine lacks, where it may (root or passwordless sudo, apt).
# Where it may not, it prints the line to run and goes on: only the parts that need them will say so later.
#   libibverbs1 libnuma1 libcurl4   Mooncake's shared libraries
#   gcc libc6-dev                   the C attention kernel, compiled at first start
#   python3-venv                    `python3 -m venv` on Debian's own Python
# With the argument "tests" also what only those need:
#   chromium                        shows the dashboard to them
#   prometheus                      its promtool tries the alert rules; the server that comes with it is turned off
#   gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user   C kernels of other CPUs than this one
# With "--list" before it the script installs nothing: it prints the packages that are missing, on one line.
set -euo pipefail

list=
[ "${1:-}" != --list ] || { list=yes; shift; }

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
if [ "${1:-}" = tests ]; then
    [ -x /usr/bin/chromium ] || missing+=(chromium)
    command -v promtool >/dev/null || missing+=(prometheus)
    command -v aarch64-linux-gnu-gcc >/dev/null || missing+=(gcc-aarch64-linux-gnu)
    [ -e /usr/aarch64-linux-gnu/include/stdlib.h ] || missing+=(libc6-dev-arm64-cross)
    command -v qemu-aarch64 >/dev/null || missing+=(qemu-user)
fi

[ ${#missing[@]} -eq 0 ] && exit 0
[ -z "$list" ] || { echo "${missing[*]}"; exit 0; }

install="apt-get install -y --no-install-recommends ${missing[*]}"

may_be_root() { [ "$(id -u)" = 0 ] || { command -v sudo >/dev/null && sudo -n true 2>/dev/null; }; }

as_root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi; }

if ! command -v apt-get >/dev/null; then
    echo "tandem: this machine lacks (Debian's names): ${missing[*]}; install them with its package manager" >&2
    exit 0
fi
if ! may_be_root; then
    echo "tandem: missing system packages; run: sudo $install" >&2
    exit 0
fi
export DEBIAN_FRONTEND=noninteractive
echo "installing system packages: ${missing[*]}"
if ! { as_root apt-get update -qq && as_root $install -qq; }; then
    echo "tandem: could not install them; run: sudo $install" >&2
elif [[ " ${missing[*]} " == *" prometheus "* ]] && command -v systemctl >/dev/null; then
    as_root systemctl disable --now prometheus >/dev/null 2>&1 || true # Debian starts what it installs
fi
