"""The learner's half of a push as a separate program: one process can't be both ends of a process group."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch

from async_rl.base.weights import open_publisher
from async_rl.base.weights.publisher import Tolerance
from tests.kit.configs import changed, server_config
from tests.kit.models import sharp_model


def main(transport: str, url: str, folder: str, run_dir: str) -> None:
    """Connect, say so, wait for a line; then push the weights of seed 5 as version 3, in buckets, and verify them."""
    config = server_config("hf", Path(folder))
    sync = replace(config.weight_sync, transport=transport, bucket_bytes=100_000)
    config = changed(config, weight_sync=sync, run={"dir": run_dir})
    model = sharp_model("tiny-qwen2", 5).eval()
    publisher = open_publisher(config, [url], 0, torch.device("cpu"))
    publisher.transport.connect()
    print("connected", flush=True)
    input()
    report = publisher.push(model.named_parameters(), version=3)
    assert report.num_bytes == sum(p.nbytes for p in model.parameters())
    tokens = list(range(5, 40))
    with torch.no_grad():
        logprobs = torch.log_softmax(model(input_ids=torch.tensor([tokens])).logits[0], dim=-1)
    publisher.verify(tokens, [float(logprobs[i, t]) for i, t in enumerate(tokens[1:])], Tolerance(1e-4, 1e-4))
    publisher.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
