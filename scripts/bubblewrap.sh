#!/usr/bin/env bash
# Installs bubblewrap from the Debian or Ubuntu packages; programs in answers run in it. Without it its tests are skipped
# with a reason.
set -euo pipefail
if command -v bwrap >/dev/null; then
    exit 0
fi
if ! command -v apt-get >/dev/null || [ "$(id -u)" != 0 ]; then
    echo "bubblewrap: needs apt-get and root; install the package bubblewrap by hand" >&2
    exit 1
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends bubblewrap
