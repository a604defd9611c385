"""Hugging Face models in the learner: logprobs at response positions, FSDP2, whole tensors by name."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

from async_rl.config import ModelConfig
from async_rl.errors import ConfigError
from learner.microbatches import MicroBatch, attention_mask

LOGITS_BYTES = 256 * 2**20
"""float32 logits that exist at a time; response tokens beyond that are done in chunks."""

_TRANSFORMED_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling")
_WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".msgpack", ".h5", ".index.json")


class Policy(nn.Module):
    """The causal LM being trained.

    Args:
        lm: a Hugging Face causal LM whose logits are its output embeddings times its last hidden state.
        compute_dtype: type of activations.

    Raises:
        ConfigError: the architecture does something else to its logits.
    """

    def __init__(self, lm: Any, compute_dtype: torch.dtype) -> None:
        super().__init__()
        changed = [name for name in _TRANSFORMED_LOGITS if getattr(lm.config, name, None) is not None]
        if changed:
            raise ConfigError(
                f"model.path: {type(lm).__name__} changes its logits by {changed[0]}, which the learner "
                "does not support. Use a model of the Qwen2, Qwen3 or Llama family."
            )
        self.lm = lm
        self.compute_dtype = compute_dtype
        self.differentiates_entropy = False

    def forward(self, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        """(learner logprobs [N] with gradient, entropy [N]) at the logged temperature, float32.

        The entropy has a gradient if `differentiates_entropy`.

        Logits exist only at response positions, in float32 for at most LOGITS_BYTES at a time; with several
        chunks the backward pass computes them anew.
        """
        states = hidden_states(self.lm.base_model, micro, self.compute_dtype)
        head = self.lm.get_output_embeddings()
        size = max(1, LOGITS_BYTES // (4 * self.lm.config.vocab_size))
        if len(states) <= size:
            return _score(states, micro.targets, micro.temperature, head, self.differentiates_entropy)
        chunks = [
            checkpoint(_score, *parts, head, self.differentiates_entropy, use_reentrant=False)
            for parts in zip(
                *(x.split(size) for x in (states, micro.targets, micro.temperature)), strict=True
            )
        ]
        return torch.cat([logprobs for logprobs, _ in chunks]), torch.cat([entropy for _, entropy in chunks])


def hidden_states(
    base: nn.Module,
    micro: MicroBatch,
    dtype: torch.dtype,
) -> Tensor:
    """Last hidden states that predict the response tokens; [N, hidden]."""
    mask = None if micro.segments is None else attention_mask(micro.segments, dtype)
    output = base(micro.tokens, attention_mask=mask, position_ids=micro.positions, use_cache=False)
    return output.last_hidden_state.flatten(0, 1)[micro.where]


def _score(
    states: Tensor,  # [N, hidden]
    targets: Tensor,  # [N]
    temperature: Tensor,  # [N]
    head: nn.Module,
    differentiates_entropy: bool,
) -> tuple[Tensor, Tensor]:
    logprobs = torch.log_softmax(head(states).float() / temperature[:, None], -1)  # [N, V]
    with torch.set_grad_enabled(differentiates_entropy and torch.is_grad_enabled()):
        entropy = -(logprobs.exp() * logprobs).sum(-1)
    return -functional.nll_loss(logprobs, targets, reduction="none"), entropy


def load_policy(config: ModelConfig, device: torch.device, compute_dtype: torch.dtype) -> Policy:
    """The model of a folder with float32 master weights, without dropout, not yet sharded."""
    lm = AutoModelForCausalLM.from_pretrained(
        config.path, dtype=torch.float32, attn_implementation=config.attn_implementation
    )
    return Policy(lm.eval().to(device), compute_dtype)


def shard(module: nn.Module, lm: Any, mesh: DeviceMesh, compute_dtype: torch.dtype) -> None:
    """FSDP2 in place: each transformer block is a unit, the rest (embeddings, head) the root's.

    Parameters and optimizer state stay float32; with another compute type each unit is cast as it is
    gathered, and gradients are reduced in float32.
    """
    precision = MixedPrecisionPolicy()
    if compute_dtype != torch.float32:
        precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    blocks = set(lm._no_split_modules or ())
    for block in lm.modules():
        if type(block).__name__ in blocks:
            fully_shard(block, mesh=mesh, mp_policy=precision)
    fully_shard(module, mesh=mesh, mp_policy=precision)


def can_share_prompts(lm: Any) -> bool:
    """Whether several answers may follow one prompt in a row: attention must take a mask that parts them."""
    return lm.config._attn_implementation in ("sdpa", "eager") and not getattr(
        lm.config, "sliding_window", None
    )


def full_parameters(policy: Policy, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, whole tensor) of each parameter, gathered as it is asked for; collective.

    Tied parameters come once, under their first name.
    """
    assert isinstance(policy, FSDPModule)
    policy.reshard()  # a forward pass without a backward leaves the root's parameters gathered
    for name, parameter in policy.lm.named_parameters():
        data = parameter.detach()
        yield name, (data.full_tensor() if isinstance(data, DTensor) else data).to(dtype)


def save_policy(policy: Policy, source: Path, target: Path, is_writer: bool) -> None:
    """Save as a Hugging Face folder: weights in the type of the `source` folder, its other files as they are.

    Collective; only the writer touches the disk, and `target` appears whole or not at all.
    """
    dtype = getattr(AutoConfig.from_pretrained(source), "dtype", None) or torch.float32
    weights = {
        name: tensor.cpu().contiguous() for name, tensor in full_parameters(policy, dtype) if is_writer
    }
    if not is_writer:
        return
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    save_file(weights, partial / "model.safetensors", metadata={"format": "pt"})
    for file in source.iterdir():
        if file.is_file() and not file.name.endswith(_WEIGHT_FILES):
            shutil.copy(file, partial / file.name)
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
