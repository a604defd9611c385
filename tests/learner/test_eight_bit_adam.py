"""torchao's Adam, whose moments have 8 bits, trains, is counted, and goes on from a checkpoint."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.kit.virtual_environments import ROOT, environment_variables, new_environment

pytestmark = pytest.mark.nightly
PROGRAM = """
import json, math, sys
from pathlib import Path

import torch
import torch.distributed as dist

from learner.memory.sizes import state_bytes
from tests.kit.configs import learner_config
from tests.kit.learner.checkpointed import train
from tests.kit.learner.updates import weights_of

torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model, folder = map(Path, sys.argv[1:])

def config(optimizer):
    return learner_config(model, learner={"lr": 1e-3, "optimizer": optimizer})

def flat(updater):
    return torch.cat([weight.flatten() for weight in weights_of(updater).values()])

name = "torchao.optim:AdamW8bit"
start = flat(train(config(name), 0))
exact = flat(train(config("AdamW"), 4)) - start
whole = flat(train(config(name), 4, folder, save_at=2))
resumed = flat(train(config(name), 2, folder))
plan = [state_bytes(config(each).learner, [(256, 256)]) / 256 ** 2 for each in ("AdamW", name)]
off = ((whole - start - exact).norm() / exact.norm()).item()
print(json.dumps({"off": off, "resumed": torch.equal(whole, resumed), "plan": plan}))
"""


def test_adam_of_8_bits_moves_as_adam_does_and_resumes_exactly(tiny_model_path: Path, tmp_path: Path) -> None:
    """Each moment is a number of 8 bits and a 256th of one of 32, that of its block; a tensor has a table of these."""
    python = new_environment(tmp_path / "environment", ("--no-deps", "torchao==0.18.0"), sees_ours=True)
    done = subprocess.run(
        [python, "-c", PROGRAM, tiny_model_path, tmp_path / "checkpoint"], capture_output=True, text=True, timeout=300,
        env=environment_variables() | {"TORCHDYNAMO_DISABLE": "1"}, cwd=ROOT,  # it compiles its step for minutes here
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert 0 < found["off"] < 0.05
    assert found["resumed"]
    assert found["plan"] == pytest.approx([8, 2 * (1 + 4 / 256 + 4 * 256 / 256**2)], rel=0.01)
