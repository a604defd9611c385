"""An optimizer from outside the packages: Muon for matrices, AdamW for embeddings, norms and biases."""

from __future__ import annotations

from typing import Any

import torch


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon (https://kellerjordan.github.io/posts/muon) with `muon_factor` times the learning rate, and AdamW.

    Args:
        most_rows: a matrix with more rows is an embedding or a head, which AdamW trains.
    """

    def __init__(
        self, params: Any, lr: float, weight_decay: float = 0.0, muon_factor: float = 20.0, most_rows: int = 16_384
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        matrices, others = [], []
        for group in self.param_groups:
            for parameter in group["params"]:
                is_matrix = parameter.ndim == 2 and len(parameter) <= most_rows
                part = {"params": [parameter], "weight_decay": group["weight_decay"]}
                (matrices if is_matrix else others).append(part)
        parts: list[tuple[torch.optim.Optimizer, float]] = []
        if matrices:
            parts.append((torch.optim.Muon(matrices, lr=lr), muon_factor))
        if others:
            parts.append((torch.optim.AdamW(others, lr=lr), 1.0))
        self._parts = parts
        for part, _ in parts:
            part.state = self.state  # what checkpoints keep

    def step(self, closure: None = None) -> None:
        for part, factor in self._parts:
            for group in part.param_groups:
                group["lr"] = factor * self.param_groups[0]["lr"]
            part.step()
