"""Optimizers whose state is unlike that of torch's own: numbers that are no tensors, blocks of a few bits, none."""

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


class Blockwise(torch.optim.Optimizer):
    """Keeps a byte for each number and a scale for each 64, as optimizers of 8 bits do, in nested containers."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                codes, scales = torch.zeros(parameter.shape, dtype=torch.uint8), torch.zeros(parameter.numel() // 64)
                self.state[parameter] = {"step": torch.zeros(()), "codes": [codes], "scales": {"of 64": scales}}


class OnGpusAlone(torch.optim.Optimizer):
    """Takes no step on a CPU."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: None = None) -> None:
        raise NotImplementedError("a kernel for GPUs")
