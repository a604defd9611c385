"""An optimizer whose state has a number that is no tensor, as those of bitsandbytes have."""

from __future__ import annotations

from typing import Any

import torch


class Counting(torch.optim.Optimizer):
    """Its n-th step of a parameter is the gradient times lr / n."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["step"] = state.get("step", 0) + 1
                    parameter -= group["lr"] / state["step"] * parameter.grad
