#!/usr/bin/env bash
# Makes or updates the virtual environment: the CUDA set where nvidia-smi works, else the CPU set. pip alone is enough, and
# uv is used where it is on PATH.
# Of the CUDA set, cuda-tile is a stub in the package index: it fetches its wheel from NVIDIA's own index, which must be
# reachable too.
# A second run sees by a hash of its inputs that nothing changed and returns at once.
#   ASYNC_RL_VENV  folder of the environment (.venv)      ASYNC_RL_SET  cpu | cuda instead of detection
#   PYTHON         interpreter to make it with (the first of python3, python3.13, ... that is 3.11 or newer)
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${ASYNC_RL_VENV:-.venv}
set=${ASYNC_RL_SET:-}
if [ -z "$set" ]; then
    if nvidia-smi >/dev/null 2>&1; then set=cuda; else set=cpu; fi
fi
constraints=constraints/$set.txt
[ -f "$constraints" ] || { echo "setup: ASYNC_RL_SET must be cpu or cuda, got '$set'" >&2; exit 1; }

stamp=$venv/.async-rl-inputs
inputs=$({ echo "$set ${PYTHON:-}"; cat scripts/setup.sh pyproject.toml "$constraints" requirements/*.txt; } | sha256sum)
if [ -x "$venv/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$inputs" ]; then
    exit 0
fi

if [ "$set" = cuda ]; then  # before gigabytes are fetched that could not run
    glibc=$(ldd --version 2>/dev/null | sed -n '1s/.* //p' || true)
    driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1 || true)
    is_older() { [ "$(printf '%s\n' "$1" "$2" | sort -V | head -n 1)" != "$2" ]; }
    if [ -n "$glibc" ] && is_older "$glibc" 2.34; then
        echo "setup: the CUDA set needs glibc 2.34 or newer (Ubuntu 22.04, Debian 12, RHEL 9), here is $glibc" >&2
        exit 1
    fi
    if [ -n "$driver" ] && is_older "$driver" 580; then
        echo "setup: the CUDA set needs an NVIDIA driver 580 or newer, here is $driver; ASYNC_RL_SET=cpu does not" >&2
        exit 1
    fi
fi

is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }
is_for_cpus() { "$1" -c 'import importlib.metadata as m; assert m.version("torch").endswith("+cpu")' 2>/dev/null; }
anew=
if [ ! -x "$venv/bin/python" ] || ! is_new_enough "$venv/bin/python"; then
    anew=1
elif [ "$set" = cuda ] && is_for_cpus "$venv/bin/python"; then  # pip would keep that torch: its version is the same
    echo "setup: $venv was made on a host without a GPU and has a torch for CPUs: making it anew"
    anew=1
fi
if [ "$anew" ]; then
    python=
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
        if is_new_enough "$candidate"; then python=$candidate; break; fi
    done
    if [ -z "$python" ]; then
        echo "setup: needs Python 3.11 or newer (looked for ${PYTHON:-python3, python3.13, python3.12, python3.11})" >&2
        exit 1
    fi
    if ! "$python" -m venv --clear "$venv"; then
        echo "setup: '$python -m venv' failed; on Debian and Ubuntu: apt install python3-venv" >&2
        exit 1
    fi
fi

if command -v uv >/dev/null; then
    for name in INDEX_URL EXTRA_INDEX_URL FIND_LINKS; do  # uv does not read pip's variables
        of_pip=PIP_$name of_uv=UV_$name
        if [ -n "${!of_pip:-}" ] && [ -z "${!of_uv:-}" ]; then export "$of_uv=${!of_pip}"; fi
    done
    # unsafe-best-match: as pip does, the best version in all indexes
    installer=(uv pip install --python "$venv/bin/python" --index-strategy unsafe-best-match)
else
    installer=("$venv/bin/python" -m pip --disable-pip-version-check install --no-compile)
fi
install() { "${installer[@]}" --quiet --constraint "$constraints" "$@"; }
torch=$(sed -n 's/^torch==//p' "$constraints")

echo "setup: installing the $set set into $venv (minutes the first time)"
if [ "$set" = cuda ]; then
    install --editable '.[dev,peers,sglang-gpu]'
else
    install "torch==$torch+cpu" 2>/dev/null || {
        echo "setup: no CPU-only build of torch $torch here, taking the default one (larger, works the same)"
        install "torch==$torch"
    }
    install --editable '.[dev,peers,sglang-cpu]'
    install --no-deps --requirement requirements/sglang-cpu-nodeps.txt
fi
"$venv/bin/python" -m compileall -qq -j 0 "$venv"/lib/python*/site-packages || true  # on all cores, pip on one
echo "$inputs" > "$stamp"
echo "setup: done"
