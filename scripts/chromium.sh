#!/usr/bin/env bash
# Installs Chromium from the Debian or Ubuntu packages, for the tests of the page in a real browser. Takes a minute.
# Without it those tests are skipped with a reason.
set -euo pipefail
if command -v chromium >/dev/null || command -v chromium-browser >/dev/null; then
    exit 0
fi
if ! command -v apt-get >/dev/null || [ "$(id -u)" != 0 ]; then
    echo "chromium: needs apt-get and root; install the package chromium by hand" >&2
    exit 1
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends chromium
