"""Updates one network with the optimizer of `learner.optimizer`: warm-up, gradient clipping, average weights.

The optimizer is one of torch.optim, or the user's class or function `module:name`. A step with non-finite numbers is
skipped.
"""

from __future__ import annotations

import difflib
import inspect
import math
import mmap
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, zeros

from async_rl.base.config import Config, LearnerConfig
from async_rl.base.config.learning import FULL_LR
from async_rl.base.errors import AsyncRLError, ConfigError
from async_rl.base.seams import import_object

if TYPE_CHECKING:
    from learner.loop.weight_average import WeightAverage

_UNFIT = ("LBFGS", "Optimizer", "SparseAdam")
"""Names in torch.optim that can't be used here: they need several passes a step, are no optimizer, or take only sparse
gradients.
"""
_EIGHT_BIT = "torchao.optim:AdamW8bit"


def open_optimizer(config: LearnerConfig, parameters: Sequence[Tensor], lr: float) -> torch.optim.Optimizer:
    """Return a new optimizer for the parameters. One-dimensional parameters get no weight decay.

    Raises:
        ConfigError: there is no optimizer of this name, or it can't be made with these parameters and optimizer_params.
    """
    make = _find(config.optimizer)
    given = dict(config.optimizer_params)
    if make is torch.optim.AdamW:
        given = {"betas": config.betas, "fused": True, **given}
    if "weight_decay" in inspect.signature(make).parameters:
        groups = _groups(parameters, config.weight_decay)
    elif config.weight_decay:
        raise ConfigError(
            f"learner.weight_decay must be 0 with learner.optimizer {config.optimizer}, which has none, got "
            f"{config.weight_decay}"
        )
    else:
        groups = [{"params": list(parameters)}]
    try:
        optimizer = make(groups, lr=lr, **given)
    except (ImportError, TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"learner.optimizer {config.optimizer} can't be made for this model with learner.optimizer_params "
            f"{config.optimizer_params}: {type(error).__name__}: {error}"
        ) from None
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"learner.optimizer {config.optimizer} must make a torch.optim.Optimizer, got an object of type "
            f"{type(optimizer).__name__}"
        )
    return optimizer


def some_lr(config: LearnerConfig) -> float:
    """Return a learning rate to try an optimizer with: learner.lr, or FULL_LR if that is `auto`, which needs a model.
    """
    return FULL_LR if config.lr == "auto" else config.lr


def check_sharded(config: LearnerConfig, parameters: Sequence[Tensor]) -> None:
    """Check that the optimizer can train sharded parameters, by two steps on small weights. Collective.

    Raises:
        ConfigError: the optimizer fails on FSDP's DTensors, as some of torch's do.
    """
    like = {parameter.ndim: parameter for parameter in parameters if isinstance(parameter, DTensor)}
    small = [
        nn.Parameter(zeros(*[64] * ndim, device_mesh=each.device_mesh, placements=each.placements))
        for ndim, each in like.items()
    ]
    if not small:
        return
    optimizer = open_optimizer(config, small, some_lr(config))
    try:
        for _ in range(2):  # the first step makes the state
            for parameter in small:
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
    except Exception as error:  # whatever an optimizer raises
        reason = (str(error).strip().splitlines() or [""])[0]
        raise ConfigError(
            f"learner.optimizer {config.optimizer} can't train weights that FSDP has sharded: {type(error).__name__}: "
            f"{reason}. Take another one"
        ) from error


def _find(name: str) -> Callable[..., Any]:
    if ":" in name:
        found = import_object(name, "learner.optimizer")
        if not callable(found):
            raise ConfigError(f"learner.optimizer {name} must be a class or a function, got {found!r:.100}")
        return found  # type: ignore[no-any-return]
    known = {
        each: kind for each, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and each not in _UNFIT
    }
    if name not in known:
        names = ", ".join(known)
        raise ConfigError(f"learner.optimizer must be {names}, or module:name, got {name!r}{_hint(name, known)}")
    return known[name]


def _hint(name: str, known: Collection[str]) -> str:
    plain = name.lower().replace("_", "").replace("-", "")
    if "8bit" in plain:
        return f". Adam with moments of 8 bits is {_EIGHT_BIT}, with torchao installed"
    same = {each.lower(): each for each in known}
    near = [each for each in same if name.lower().startswith(f"{each}_")]  # as adamw_torch_fused of transformers
    near = near or difflib.get_close_matches(plain, same, n=1, cutoff=0.8)
    meant = f". Did you mean {same[near[0]]}?" if near else ""
    return f"{meant or '.'} Another package's is named with its module, as {_EIGHT_BIT}"


def _groups(parameters: Sequence[Tensor], weight_decay: float) -> list[dict[str, Any]]:
    """Return the parameters in groups for an optimizer: weight decay for matrices, none for biases and norms."""
    decays = {parameter: weight_decay if parameter.ndim > 1 else 0.0 for parameter in parameters}
    return [
        {"params": [parameter for parameter in parameters if decays[parameter] == decay], "weight_decay": decay}
        for decay in dict.fromkeys(decays.values())
    ]


_MOMENTS = ("exp_avg", "exp_avg_sq")
SAMPLE = 1 << 20
"""About this many weights of a rank are compared to measure how far an update has moved the weights."""


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """The result of one optimizer step, the same on all ranks. `grad_norm` is the norm before clipping."""

    loss: float
    grad_norm: float
    lr: float
    skipped: bool


def check_finite(module: nn.Module, path: str) -> None:
    """Raise ConfigError, naming the tensor, if a weight of `module`, loaded from `path`, is NaN or infinite."""
    if name := non_finite(module):
        raise ConfigError(
            f"the weights in {path} are not finite: {name} holds NaN or infinity. Take an undamaged copy of the model"
        )


def non_finite(module: nn.Module) -> str:
    """Return the name of a parameter with NaN or infinity, "" if there is none. Checks only this rank's shards."""
    own = ((name, _local(parameter.detach())) for name, parameter in module.named_parameters())
    # the norm needs no memory, isfinite almost twice a tensor's
    return next((n for n, t in own if t.numel() and not torch.linalg.vector_norm(t, math.inf).isfinite()), "")


def lr_decay(version: int, config: Config) -> float:
    """Return the factor of all learning rates in the step that trains on batch `version`; see `decayed`."""
    learner = config.learner
    return decayed(version, config.run.steps, learner.lr_decay_fraction, learner.lr_decay, learner.lr_decay_to)


def decayed(done: int, steps: int, fraction: float, shape: str = "linear", end: float = 0.0) -> float:
    """Return the factor of the learning rate after `done` of `steps` steps: 1, then falling to `end`.

    It falls over the last `fraction` of the steps.

    Sources: warmup-stable-decay, MiniCPM, arXiv 2404.06395, section 4; the cosine is from SGDR, arXiv 1608.03983,
    equation 5.

    Args:
        shape: `linear` or `cosine`.
    """
    left = min(1.0, (steps - done) / max(1.0, fraction * steps)) if fraction else 1.0
    return end + (1 - end) * ((1 - math.cos(math.pi * left)) / 2 if shape == "cosine" else left)


class Optimizer:
    """Takes the optimizer steps of one network, `policy` or `critic`, by learner.optimizer and with gradient clipping.

    The k-th step (from 1) uses the learning rate lr * decay * min(1, k / warmup_steps).

    With `learner.offload: moments` AdamW's moments are in CPU memory, and on the GPU for one parameter at a time during
    a step.

    Args:
        module: the network, sharded by FSDP.
        averages: keep a moving average of the weights if learner.ema_decay is set.
    """

    def __init__(
        self, network: str, module: nn.Module, lr: float, config: LearnerConfig, *, averages: bool = False
    ) -> None:
        self._network = network
        self.module = module
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        self._offloads = config.offload == "moments"
        parts = [[parameter] for parameter in self._parameters] if self._offloads else [self._parameters]
        self._inner = [open_optimizer(config, part, lr) for part in parts]
        self._given = self._numbers()
        """The numbers in the optimizer's parameter groups before the first step. They are settings, which a resume may
        change.
        """
        if not isinstance(self._inner[0], torch.optim.AdamW):
            check_sharded(config, self._parameters)
        self._inner_of: dict[Tensor, torch.optim.Optimizer] = {
            parameter: inner for part, inner in zip(parts, self._inner, strict=True) for parameter in part
        }
        first = self._parameters[0]
        self._device = first.device_mesh.device_type if isinstance(first, DTensor) else first.device.type
        self._copies = _copies(first)
        self._slices = config.sequence_parallel
        self._lr = lr
        self._warmup_steps = config.warmup_steps
        self._grad_clip = config.grad_clip
        self._max_skipped = config.max_skipped_steps
        self.steps = 0
        """The number of steps taken, also before a resume."""
        self._skipped_in_a_row = 0
        self._begun = torch.empty(0)
        self.average: WeightAverage | None = None
        if averages and config.ema_decay:
            from learner.loop.weight_average import WeightAverage

            self.average = WeightAverage(module, config.ema_decay)

    def step(self, loss: Tensor, decay: float = 1.0) -> OptimizerStep:
        """Clip the gradients, take a step, and clear the gradients. Collective.

        The step is skipped if the loss or a gradient is not finite.

        Args:
            loss: the loss of this rank's share of the minibatch, a scalar. The losses of all shares add up to the whole
                loss.
            decay: factor of the learning rate, from `lr_decay`.

        Raises:
            AsyncRLError: learner.max_skipped_steps steps in a row had to be skipped.
        """
        gradients = [_local(p.grad) for p in self._parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients).to(loss.device)  # with learner.offload all it is on the CPU
        squared = norm.double().square() / self._copies
        totals = torch.stack([squared, loss.detach().double() / self._slices])
        dist.all_reduce(totals)
        squared_norm, total_loss = totals.tolist()
        grad_norm = squared_norm**0.5
        lr = self._lr * decay * min(1.0, (self.steps + 1) / max(1, self._warmup_steps))
        finite = bool(torch.isfinite(totals).all())
        if finite:
            scale = self._grad_clip / (grad_norm + 1e-6)
            if scale < 1:
                torch._foreach_mul_(gradients, scale)
            for inner in self._inner:
                self._step_part(inner, lr)
            self.steps += 1
            if self.average:
                self.average.update()
        self.drop()
        self._skipped_in_a_row = 0 if finite else self._skipped_in_a_row + 1
        if self._skipped_in_a_row == self._max_skipped:
            raise AsyncRLError(
                f"{self._network}: {self._max_skipped} optimizer steps in a row had no finite loss and "
                f"gradient (loss {total_loss}, gradient norm {grad_norm}). Lower the learning rate, or use "
                "model.dtype: float32."
            )
        return OptimizerStep(total_loss, grad_norm, lr, skipped=not finite)

    def drop(self) -> None:
        """Clear the gradients: a step has used them, or none will because a KL limit ended the update on this batch."""
        for inner in self._inner:
            inner.zero_grad(set_to_none=True)

    def largest_weight(self) -> Tensor:
        """Return the largest magnitude of the weights in this rank's shards, a scalar; NaN if one of them is NaN."""
        weights = [_local(p.detach()) for p in self._parameters]
        norm = torch.nn.utils.get_total_norm([shard for shard in weights if shard.numel()], math.inf)
        return norm.to(self._device)  # of empty or of offloaded shards it is in CPU memory

    def begin(self) -> None:
        """Remember the weights before an update of one or more steps, for `moved`."""
        self._begun = self._sampled()

    def moved(self) -> Tensor:
        """Return [sum of squared changes since `begin`, number of weights] for a sample of this rank's weights. [2]"""
        change = (self._sampled() - self._begun).to(self._device).double()
        return torch.stack([change.square().sum(), torch.full_like(change.sum(), change.numel())])

    def _sampled(self) -> Tensor:
        """Return a copy of about SAMPLE weights of this rank's shards, evenly spread."""
        shards = [_local(p.detach()).reshape(-1) for p in self._parameters]
        stride = max(1, sum(shard.numel() for shard in shards) // SAMPLE)
        return torch.cat([shard[::stride] for shard in shards])

    def counts(self) -> dict[str, float]:
        """Return the numbers that a checkpoint saves: {"steps": taken, "skipped_in_a_row": skipped since then, ...}.

        The rest are numbers in the optimizer's parameter groups that have changed since its start: some optimizers
        count or estimate there.
        """
        own = {key: number for key, number in self._numbers().items() if number != self._given[key]}
        return {"steps": self.steps, "skipped_in_a_row": self._skipped_in_a_row, **own}

    def set_counts(self, counts: Mapping[str, float]) -> None:
        self.steps, self._skipped_in_a_row = int(counts["steps"]), int(counts["skipped_in_a_row"])
        for key, group, name in self._entries():
            if key in counts:
                group[name] = type(group[name])(counts[key])

    def _numbers(self) -> dict[str, float]:
        return {key: group[name] for key, group, name in self._entries()}

    def _entries(self) -> Iterator[tuple[str, dict[str, Any], str]]:
        """Yield (key, group, name) of each number in the optimizer's parameter groups, except the learning rate.

        The number is group[name]; `key` is unique over all groups.
        """
        for index, group in enumerate(group for inner in self._inner for group in inner.param_groups):
            for name, value in group.items():
                if name != "lr" and isinstance(value, int | float):
                    yield f"{index}.{name}", group, name

    def state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the optimizer's state of a parameter: its own tensors, not copies, and its numbers as tensors.

        AdamW's tensors are zeros before the first step. Other optimizers have no state until then.
        """
        inner = self._inner_of[parameter]
        state = inner.state[parameter]
        if not state and isinstance(inner, torch.optim.AdamW):
            state["step"] = torch.zeros((), device=parameter.device)
            for moment in _MOMENTS:
                state[moment] = _zeros_on_cpu(parameter) if self._offloads else torch.zeros_like(parameter.detach())
            if inner.param_groups[0]["amsgrad"]:
                state["max_exp_avg_sq"] = torch.zeros_like(parameter.detach())
        return {
            key: value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
            for key, value in state.items() if isinstance(value, (Tensor, int, float))
        }

    def make_state(self) -> None:
        """Make the state of all parameters, into which a checkpoint can be loaded, by a step with zero gradients.

        Load the weights afterwards: some optimizers move weights even with a learning rate of 0.
        """
        for inner in self._inner:
            if isinstance(inner, torch.optim.AdamW):
                continue
            for parameter in self._parameters:
                parameter.grad = torch.zeros_like(parameter)
            _set_lr(inner, 0.0)
            inner.step()
        self.drop()

    def set_numbers(self, parameter: Tensor, state: Mapping[str, Tensor]) -> None:
        """Set the plain numbers in the optimizer's state of a parameter from `state`. Its tensors were loaded in place.
        """
        own = self._inner_of[parameter].state[parameter]
        for key, value in own.items():
            if isinstance(value, (int, float)):
                own[key] = type(value)(state[key].item())

    def _step_part(self, inner: torch.optim.Optimizer, lr: float) -> None:
        """Take a step of one inner optimizer. Offloaded moments are moved to the GPU for it and back."""
        _set_lr(inner, lr)
        if not self._offloads:
            inner.step()
            return
        (parameter,) = inner.param_groups[0]["params"]
        if parameter.grad is None:
            return
        self.state_of(parameter)  # makes it before the first step
        state = inner.state[parameter]
        kept = {moment: state[moment] for moment in _MOMENTS}
        state |= {moment: tensor.to(self._device, non_blocking=True) for moment, tensor in kept.items()}
        inner.step()
        for moment, tensor in kept.items():
            tensor.copy_(state[moment])
        state |= kept


def _set_lr(inner: torch.optim.Optimizer, lr: float) -> None:
    for group in inner.param_groups:
        if isinstance(group["lr"], Tensor):  # torchao's compiled steps hold it
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def _zeros_on_cpu(parameter: Tensor) -> Tensor:
    """Return zeros of a parameter's shape and sharding in CPU memory, pinned if the parameter is on a GPU."""
    if parameter.device.type != "cuda":
        return torch.zeros_like(parameter.detach(), device="cpu")
    pinned = pinned_zeros(_local(parameter.detach()).shape, parameter.dtype)
    if not isinstance(parameter, DTensor):
        return pinned
    zeros = torch.zeros_like(parameter.detach(), device="cpu")
    zeros._local_tensor = pinned  # type: ignore[attr-defined] # DTensor.from_local would copy it to the mesh's device
    return zeros


def _copies(parameter: Tensor) -> int:
    """Return how many ranks have the same shard of a parameter as this rank, including this one."""
    if not isinstance(parameter, DTensor):
        return 1
    sizes = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
    return math.prod(size for size, placement in sizes if placement.is_replicate())


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def pinned_zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return zeros in CPU memory that is registered with CUDA until the tensor and all views of it are gone.

    The tensor has its own memory pages. In pages from malloc, a neighbouring tensor would be registered in part, and
    CUDA refuses to copy such tensors ("invalid argument"). torch's pinned memory would round up to a power of two.
    """
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    if not num_bytes:
        return torch.zeros(tuple(shape), dtype=dtype)
    memory = mmap.mmap(-1, num_bytes)
    owner = np.frombuffer(memory, np.uint8)
    address = owner.ctypes.data
    cuda = torch.cuda.cudart()
    torch.cuda.check_error(int(cuda.cudaHostRegister(address, num_bytes, 0)))
    # A weak reference of the array is called before the array lets go of the memory; at exit all of it is let go.
    weakref.finalize(owner, _unregister, memory, address).atexit = False
    return torch.from_numpy(owner).view(dtype).view(tuple(shape))


def _unregister(memory: mmap.mmap, address: int) -> None:
    """Unregister memory from CUDA after all copies have ended. The argument `memory` keeps it mapped until then."""
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaHostUnregister(address)
