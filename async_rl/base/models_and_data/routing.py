"""Records and replays the experts chosen in a model, for any family whose blocks choose by `torch.topk`.

    routing = Routing(lm, experts)             changes the forward of each block that has a child `experts`
    with routing.recording() as chosen: lm(x)  chosen() is [tokens, layers, k]
    with routing.replaying(experts): lm(x)     the blocks use these experts

Inside a block, the `torch.topk` over the experts returns the given indices, with the block's own scores at these
indices. Softmax or sigmoid, bias, groups and renormalisation are the block's own code on its current logits, so routers
keep their gradient: R3, arXiv 2510.11370, without a table of families. `self_test` finds a family for which that does
not work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from async_rl.base.errors import ConfigError
from async_rl.base.models_and_data.experts import HINT, Experts


class Routing:
    """The routers of a model `lm`, in the order of its layers.

    Raises:
        ConfigError: one of the layers in `experts` has no block with a child `experts`.
    """

    def __init__(self, lm: Any, experts: Experts) -> None:
        blocks = [m for m in lm.modules() if isinstance(getattr(m, "experts", None), nn.Module)]
        self.experts = experts
        if len(blocks) != len(experts.layers):
            raise _unfit(f"{len(blocks)} modules with a child `experts` in {len(experts.layers)} layers with experts")
        self.given: Tensor | None = None
        """The experts that are replayed, [tokens, layers, k]; where they are -1, and with None, the router chooses."""
        self._replayed = self._changed = torch.zeros((), dtype=torch.int64)
        self._seen: list[Tensor | None] | None = None
        for i, block in enumerate(blocks):
            block.forward = partial(self._forward, i, block.forward)
            block.experts.forward = partial(self._experts_forward, block.experts.forward)

    def _forward(self, layer: int, forward: Callable[..., Any], *args: Any, **options: Any) -> Any:
        choice = _ExpertChoice(self.experts.count, None if self.given is None else self.given[:, layer])
        with choice:
            output = forward(*args, **options)
        if choice.replayed is not None and choice.changed is not None:
            self._replayed, self._changed = choice.replayed + self._replayed, choice.changed + self._changed
        if self._seen is not None:
            self._seen[layer] = choice.seen
        return output

    def _experts_forward(self, forward: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Compute the experts after the choice, without watching torch's calls, which would cost most here."""
        if self._seen is None:
            return forward(*args, **options)
        with torch._C.DisableTorchFunction():
            return forward(*args, **options)

    @contextmanager
    def recording(self) -> Iterator[Callable[[], Tensor]]:
        """A context with a function that returns the experts used in the forward pass inside it, [tokens, layers, k].
        """
        seen: list[Tensor | None] = [None] * len(self.experts.layers)
        self._seen = seen
        try:
            yield lambda: torch.stack([each for each in seen if each is not None], 1)
        finally:
            self._seen = None

    @contextmanager
    def replaying(self, experts: Tensor | None) -> Iterator[None]:
        """Within this context the model uses the given experts [tokens, layers, k]. With None, the routers choose."""
        before, self.given = self.given, experts
        try:
            yield
        finally:
            self.given = before

    def take_counts(self) -> tuple[Tensor, Tensor]:
        """Return counts of pairs (token, layer) since the last call: those replayed, and those with other experts
        chosen.

        The second count is of replayed pairs for which the router would have chosen other experts.
        """
        taken = self._replayed, self._changed
        self._replayed = self._changed = torch.zeros((), dtype=torch.int64)
        return taken

    def checkpoint_contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """The `context_fn` for torch.utils.checkpoint: a recomputed forward pass uses the experts of the first pass."""
        return nullcontext(), self.replaying(self.given)

    def self_test(self, forward: Callable[[], Tensor]) -> None:
        """Check that recording and replaying work for this model. Collective, if the model is sharded.

        Args:
            forward: computes some logprobs with the model, for the same tokens each time.

        Raises:
            ConfigError: they do not work. The message says what was found.
        """
        count, shape = self.experts.count, (len(self.experts.layers), self.experts.per_token)
        with torch.no_grad(), _CountChoices(count) as everywhere, self.recording() as chosen:
            plain = forward()
        if everywhere.count != shape[0] or (own := chosen()).shape[1:] != shape:
            raise _unfit(f"a pass has {everywhere.count} calls of torch.topk over {count} experts, and not one in each "
                         f"of {shape[0]} layers for {shape[1]} experts")
        other = (own + 1) % count
        with torch.no_grad():
            with self.replaying(own):
                same = forward()
            with self.replaying(other), self.recording() as chosen:
                moved = forward()
        if not torch.equal(chosen(), other):
            raise _unfit("its blocks do not use the given experts")
        self.take_counts()
        error, effect = float((same - plain).abs().max()), float((moved - plain).abs().max())
        if shape[1] < count and not error <= 0.1 * effect:  # a set of all experts has no other
            raise _unfit(f"its own choice changes logprobs by {error:.1e}, another one by {effect:.1e}")


def _unfit(found: str) -> ConfigError:
    return ConfigError(f"rollout.routing: the choice of experts of this model can't be replayed: {found}; {HINT}")


def _scores(func: Any, args: Any, options: Any, count: int) -> Tensor | None:
    """Return the scores [tokens, experts] in a torch call that chooses experts; None for any other call."""
    if func not in (torch.topk, torch.Tensor.topk):
        return None
    scores: Tensor = args[0] if args else options["input"]
    # DeepSeek's routers choose groups first, from [tokens, groups, experts of a group]
    return scores if scores.ndim == 2 and scores.shape[-1] == count else None


class _ExpertChoice(TorchFunctionMode):
    """Replaces the choice of experts inside a block by `given` [tokens, k], and stores the experts used in `seen`."""

    def __init__(self, count: int, given: Tensor | None) -> None:
        super().__init__()
        self.count, self.given = count, given
        self.seen: Tensor | None = None
        self.replayed: Tensor | None = None
        self.changed: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        scores = _scores(func, args, kwargs, self.count)
        if scores is None:
            return result
        self.seen = own = result[1].detach()
        if self.given is None:
            return result
        is_given = self.given >= 0
        self.seen = used = torch.where(is_given, self.given.long(), own)
        differs = (used.sort(-1).values != own.sort(-1).values).any(-1)
        self.replayed, self.changed = is_given[:, 0].sum(), differs.sum()
        return torch.return_types.topk((scores.gather(-1, used), used))


class _CountChoices(TorchFunctionMode):
    """Counts the choices of experts, inside and outside blocks."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.num_experts, self.count = num_experts, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += _scores(func, args, kwargs, self.num_experts) is not None
        return func(*args, **(kwargs or {}))
