"""Mixtures of experts of five families, and what they compute with given experts, written out without their code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import Tensor

from async_rl.base.models_and_data.experts import Experts

COUNT, CHOSEN = 8, 2
"""The experts of a layer, and how many of them a token uses."""
_SIZES: dict[str, Any] = {
    "vocab_size": 23, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "max_position_embeddings": 64,
    "num_experts_per_tok": CHOSEN, "num_experts": COUNT, "num_local_experts": COUNT, "n_routed_experts": COUNT,
    "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
_OWN: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {"norm_topk_prob": True},
    "Qwen2Moe": {"shared_expert_intermediate_size": 24, "norm_topk_prob": False},
    "Mixtral": {},
    "Olmoe": {"norm_topk_prob": False},
    "DeepseekV3": {
        "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
        "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1, "routed_scaling_factor": 1.7,
    },
}  # fmt: skip
FAMILIES = tuple(_OWN)


def tiny_experts(family: str, seed: int = 0, **sizes: Any) -> Any:
    """A random model of a family, whose tokens and routers have decided opinions."""
    config = getattr(transformers, f"{family}Config")(**_SIZES | _OWN.get(family, {}) | sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        lm = getattr(transformers, f"{family}ForCausalLM")(config).eval()
        with torch.no_grad():
            for parameter in lm.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(0, 0.3)
    return lm


def blocks_of(lm: Any) -> list[Any]:
    return [layer.mlp for layer in lm.model.layers if hasattr(layer.mlp, "experts")]


def experts_in(lm: Any) -> Experts:
    layers = [i for i, layer in enumerate(lm.model.layers) if hasattr(layer.mlp, "experts")]
    return Experts(tuple(layers), COUNT, CHOSEN)


def _weights(family: str, config: Any, logits: Tensor, chosen: Tensor) -> Tensor:
    """The weight of each chosen expert, as each family's paper and config define it. [tokens, E], [tokens, k]"""
    if family == "DeepseekV3":
        scores = logits.sigmoid().gather(1, chosen)
        return config.routed_scaling_factor * scores / scores.sum(1, keepdim=True)
    scores = logits.softmax(1).gather(1, chosen)
    return scores / scores.sum(1, keepdim=True) if family in ("Qwen3Moe", "Mixtral") else scores


def _mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T


def block_output(family: str, config: Any, block: Any, x: Tensor, chosen: Tensor) -> Tensor:
    """What a block makes of the states x [tokens, hidden] with the experts `chosen` [tokens, k]."""
    weights = _weights(family, config, x @ block.gate.weight.T, chosen)
    rows = []
    for state, experts, of_experts in zip(x, chosen.tolist(), weights, strict=True):
        parts = []
        for expert, weight in zip(experts, of_experts, strict=True):
            gate, up = block.experts.gate_up_proj[expert].chunk(2)
            parts.append(weight * _mlp(state, gate, up, block.experts.down_proj[expert]))
        rows.append(sum(parts))
    output = torch.stack(rows)
    shared = getattr(block, "shared_expert", None) or getattr(block, "shared_experts", None)
    if shared is not None:
        of_all = _mlp(x, shared.gate_proj.weight, shared.up_proj.weight, shared.down_proj.weight)
        gate = (x @ block.shared_expert_gate.weight.T).sigmoid() if family == "Qwen2Moe" else 1.0
        output = output + gate * of_all
    return output


@contextmanager
def written_out(family: str, lm: Any, chosen: Tensor) -> Iterator[None]:
    """Inside the `with` block the blocks of `lm` use the experts `chosen` [tokens, layers, k], by `block_output`."""

    def forward_of(i: int, block: Any) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            return block_output(family, lm.config, block, x.flatten(0, -2), chosen[:, i]).view_as(x)

        return forward

    blocks = blocks_of(lm)
    try:
        for i, block in enumerate(blocks):
            block.forward = forward_of(i, block)
        yield
    finally:
        for block in blocks:
            del block.forward
