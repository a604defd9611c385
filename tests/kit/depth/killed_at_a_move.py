"""Trains with moves at random, and kills the learner or the driver when a move was just sent to the learner.

    python -m tests.kit.depth.killed_at_a_move VICTIM VERSION CONFIG OVERRIDE ...
"""

from __future__ import annotations

import os
import signal
import sys

import ray

from async_rl.config.loading import load_config
from async_rl.driver.depth_tuner import DepthTuner
from async_rl.pipeline import run
from tests.kit.depth.random_moves import move_at_random


def main() -> None:
    victim, at, config, *overrides = sys.argv[1:]

    def kill(tuner: DepthTuner, version: int) -> None:
        if version != int(at):
            return
        if victim == "driver":
            os.kill(os.getpid(), signal.SIGKILL)
        ray.kill(tuner._processes.actors["learner/0"])

    move_at_random(setattr, sent=kill)
    run(load_config(config, overrides))


if __name__ == "__main__":
    main()
