#!/usr/bin/env bash
# Run the GPU tests and benchmarks that fit MINUTES, the most informative first; JSON and PNG results in OUT.
#   scripts/gpu_suite.sh MINUTES [OUT] [--list]
#   OUT: $OUT, else runs/gpu-suite/out; --list prints what would run and starts nothing
# The environment is that of the interpreter ASYNC_RL_PYTHON, as it is; without it scripts/setup.sh makes one.
# The same command continues with the steps that are left. See docs/how-to/gpus.md.
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -ge 1 ] || { sed -n '2,6s/^# //p' "$0" >&2; exit 2; }
start=$SECONDS

if [ -n "${ASYNC_RL_PYTHON:-}" ]; then
    python=$ASYNC_RL_PYTHON
else
    bash scripts/setup.sh
    python=.venv/bin/python
fi
minutes=$("$python" -c "print($1 - ($SECONDS - $start) / 60)")  # time that is left after the set-up
shift
PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} exec "$python" -m benchmarks.gpu_suite "$minutes" "$@"
