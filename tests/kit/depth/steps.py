"""The metrics of a step, as the controller of the depth gets them."""

from __future__ import annotations


def step_values(**changed: float) -> dict[str, float]:
    """Metrics of a step of 5 s at staleness 2; others are given with `__` for `/`: `time__train_s=4.0`."""
    usual = {
        "time/step_s": 5.0, "time/train_s": 3.0, "time/push_s": 0.5, "push/pause_s": 0.25, "time/wait_data_s": 1.1,
        "buffer/waited_s": 1.0, "staleness/mean": 2.0,
        "offpolicy/kl_behaviour_proximal_k3": 0.02, "policy/lr_scale": 0.95,
        "buffer/trained": 0.0, "buffer/dropped_zero_variance": 0.0, "buffer/dropped_failed": 0.0,
    }
    return usual | {name.replace("__", "/"): value for name, value in changed.items()}
