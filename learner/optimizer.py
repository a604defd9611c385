"""Updates one network by AdamW with warm-up and gradient clipping. A step whose numbers aren't finite is skipped."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from async_rl.config import LearnerConfig
from async_rl.errors import AsyncRLError, ConfigError


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """The result of one optimizer step, the same on all ranks; the gradient's norm is that before clipping."""

    loss: float
    grad_norm: float
    lr: float
    skipped: bool


def check_finite(module: nn.Module, path: str) -> None:
    """Raise ConfigError, which names the tensor, if a weight of `module`, loaded from `path`, is NaN or infinite."""
    if name := non_finite(module):
        raise ConfigError(
            f"the weights in {path} are not finite: {name} holds NaN or infinity. Take an undamaged copy of the model"
        )


def non_finite(module: nn.Module) -> str:
    """Return the name of a parameter that holds NaN or infinity, in this rank's shard if it is sharded, or ""."""
    return next((name for name, p in module.named_parameters() if not _local(p.detach()).isfinite().all()), "")


def lr_decay(done: int, steps: int, fraction: float) -> float:
    """Return the learning rate's factor after `done` of `steps` steps: 1, then linear to 0 over the last `fraction`.

    Source: warmup-stable-decay, MiniCPM, arXiv 2404.06395, section 4, here with a linear decay.
    """
    return min(1.0, (steps - done) / max(1.0, fraction * steps)) if fraction else 1.0


class Optimizer:
    """Updates the sharded `module` of one network, called `policy` or `critic`, with AdamW and gradient clipping.

    The k-th step (from 1) uses the learning rate lr * decay * min(1, k / warmup_steps).
    """

    def __init__(self, network: str, module: nn.Module, lr: float, config: LearnerConfig) -> None:
        self._network = network
        self.module = module
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        self._adamw = torch.optim.AdamW(
            self._parameters, lr=lr, betas=config.betas, weight_decay=config.weight_decay, fused=True
        )
        self._copies = _copies(self._parameters[0])
        self._slices = config.sequence_parallel
        self._lr = lr
        self._warmup_steps = config.warmup_steps
        self._grad_clip = config.grad_clip
        self._max_skipped = config.max_skipped_steps
        self._steps = 0
        self._skipped_in_a_row = 0

    def step(self, loss: Tensor, decay: float = 1.0) -> OptimizerStep:
        """Clip the gradients, take a step if they and the loss are finite, and clear them. Collective.

        Args:
            loss: the part of the minibatch's loss that belongs to this rank's share of the batch, a scalar; the parts
                of all shares add up to the loss.
            decay: share of the learning rate from `lr_decay`.

        Raises:
            AsyncRLError: learner.max_skipped_steps steps in a row had to be skipped.
        """
        gradients = [_local(p.grad) for p in self._parameters if p.grad is not None]
        squared = torch.nn.utils.get_total_norm(gradients).double().square() / self._copies
        totals = torch.stack([squared, loss.detach().double() / self._slices])
        dist.all_reduce(totals)
        squared_norm, total_loss = totals.tolist()
        grad_norm = squared_norm**0.5
        lr = self._lr * decay * min(1.0, (self._steps + 1) / max(1, self._warmup_steps))
        finite = bool(torch.isfinite(totals).all())
        if finite:
            scale = self._grad_clip / (grad_norm + 1e-6)
            if scale < 1:
                torch._foreach_mul_(gradients, scale)
            for group in self._adamw.param_groups:
                group["lr"] = lr
            self._adamw.step()
            self._steps += 1
        self._adamw.zero_grad(set_to_none=True)
        self._skipped_in_a_row = 0 if finite else self._skipped_in_a_row + 1
        if self._skipped_in_a_row == self._max_skipped:
            raise AsyncRLError(
                f"{self._network}: {self._max_skipped} optimizer steps in a row had no finite loss and "
                f"gradient (loss {total_loss}, gradient norm {grad_norm}). Lower the learning rate, or use "
                "model.dtype: float32."
            )
        return OptimizerStep(total_loss, grad_norm, lr, skipped=not finite)

    def drop(self) -> None:
        """Drop gradients that no step will use, because a KL limit has ended the update of this batch."""
        self._adamw.zero_grad(set_to_none=True)

    def largest_weight(self) -> Tensor:
        """Return the largest magnitude of the weights in this rank's shards, a scalar; NaN if one of them is NaN."""
        weights = [_local(p.detach()) for p in self._parameters]
        norm = torch.nn.utils.get_total_norm([shard for shard in weights if shard.numel()], math.inf)
        return norm.to(weights[0].device)  # a rank whose shards are all empty gets a zero in CPU memory

    def counts(self) -> dict[str, int]:
        """Return the counts that a checkpoint keeps: {"steps": taken, "skipped_in_a_row": skipped without a break}."""
        return {"steps": self._steps, "skipped_in_a_row": self._skipped_in_a_row}

    def set_counts(self, counts: Mapping[str, int]) -> None:
        self._steps, self._skipped_in_a_row = counts["steps"], counts["skipped_in_a_row"]

    def state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return AdamW's own tensors for a parameter, not copies; they are zeros before the first step."""
        state: dict[str, Tensor] = self._adamw.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter.detach())
            state["exp_avg_sq"] = torch.zeros_like(parameter.detach())
        return state


def _copies(parameter: Tensor) -> int:
    """Return the number of ranks that hold the same shard of a parameter as this rank."""
    if not isinstance(parameter, DTensor):
        return 1
    sizes = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
    return math.prod(size for size, placement in sizes if placement.is_replicate())


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
