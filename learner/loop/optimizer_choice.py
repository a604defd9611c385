"""Makes the optimizer that `learner.optimizer` names: one of torch.optim, or a class or function as `module:name`."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, zeros

from async_rl.base.config import LearnerConfig
from async_rl.base.config.learning import FULL_LR
from async_rl.base.errors import ConfigError
from async_rl.base.seams import import_object

_UNFIT = ("LBFGS", "Optimizer", "SparseAdam")
"""Names of torch.optim that need several passes a step, are no optimizer, or take sparse gradients alone."""
_EIGHT_BIT = "torchao.optim:AdamW8bit"


def open_optimizer(config: LearnerConfig, parameters: Sequence[Tensor], lr: float) -> torch.optim.Optimizer:
    """Return a new optimizer of the parameters; one-dimensional parameters get no weight decay.

    Raises:
        ConfigError: there is none of this name, or it can't be made with these parameters and optimizer_params.
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
    """Return a learning rate to try an optimizer with; learner.lr auto depends on a model."""
    return FULL_LR if config.lr == "auto" else config.lr


def check_optimizer(config: LearnerConfig) -> None:
    """Raise the ConfigError of `open_optimizer` for a matrix and a bias, which every model has, in place of a model."""
    open_optimizer(config, [nn.Parameter(torch.zeros(64, 64)), nn.Parameter(torch.zeros(64))], some_lr(config))


def check_sharded(config: LearnerConfig, parameters: Sequence[Tensor]) -> None:
    """Take a step with small weights that are sharded as the parameters are. Collective.

    Raises:
        ConfigError: the optimizer can't, as some of torch's can't with the DTensors of FSDP.
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
    """Return the parameters as an optimizer's groups: biases and norms, of one dimension, have no weight decay."""
    decays = {parameter: weight_decay if parameter.ndim > 1 else 0.0 for parameter in parameters}
    return [
        {"params": [parameter for parameter in parameters if decays[parameter] == decay], "weight_decay": decay}
        for decay in dict.fromkeys(decays.values())
    ]
