#!/usr/bin/env bash
# Makes the keys that the base's Secret is generated from, where they are missing: secrets never stand in a manifest.
#   base/secrets/cluster.secret  what workers and router share
#   base/secrets/api.keys        keys of clients, one a line; the first one is the router's own at the workers
#   base/secrets/admin.keys      the same for admins
set -euo pipefail
umask 077
folder=$(dirname "$0")/base/secrets
mkdir -p "$folder"
for name in cluster.secret api.keys admin.keys; do
    [ -s "$folder/$name" ] || head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n' >"$folder/$name"
done
echo "keys are in $folder"
