"""An optimizer whose state is unlike that of torch's own: numbers that are no tensors."""

from __future__ import annotations

from typing import Any

import torch


class Counting(torch.optim.Optimizer):
    """Its n-th step of a parameter is the gradient times lr / n, and smaller by what its groups estimate."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        for group in self.param_groups:
            group["estimate"] = 1.0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            group["estimate"] *= 1.5
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["step"] = state.get("step", 0) + 1
                    parameter -= group["lr"] / state["step"] / group["estimate"] * parameter.grad
