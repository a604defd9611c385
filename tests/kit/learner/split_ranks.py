"""Two ranks that split rows score the same packs with each kernel of attention, on a CPU."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from async_rl.base.config import LearnerConfig, LearnerPlacement, PlacementConfig
from learner.loop.ranks import open_ranks
from learner.models import sequence
from learner.models.policy import Policy, shard
from learner.packing import ForwardInputs, Layout, collate, make_pieces, plan_microbatches
from tests.kit.configs import learner_config
from tests.kit.learner.batches import make_batch
from tests.kit.models import VOCAB

HEADS = {"heads": (4, 1), "keys": (3, 3)}
"""By what two ranks exchange, the heads of queries and of keys; one head of keys must be repeated."""
Case = tuple[str, str]
"""Kernel, exchange."""


def split_policy(exchange: str, kernel: str = "sdpa") -> Policy:
    """A policy that is told that it has a kernel: flash attention can't be loaded on a CPU."""
    heads, kv_heads = HEADS[exchange]
    torch.manual_seed(0)
    lm = Qwen3ForCausalLM(Qwen3Config(
        vocab_size=VOCAB, hidden_size=24, intermediate_size=32, num_hidden_layers=2, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=16, max_position_embeddings=64, initializer_range=0.3,
        tie_word_embeddings=False, pad_token_id=0,
    ))  # fmt: skip
    lm.config._attn_implementation_internal = kernel  # type: ignore[attr-defined]
    return Policy(lm.eval(), torch.float32)


def packs(kernel: str) -> list[ForwardInputs]:
    """The passes of a batch: packs without padding where the kernel allows them, with shared prompts but for flash."""
    batch = make_batch()
    layout = Layout(masked=kernel != "flash_attention_2", sparse=kernel != "sdpa")
    pairs = [(g, i) for g, group in enumerate(batch.groups) for i in range(len(group.rows))]
    pieces = make_pieces(batch.groups, pairs, 57, 4, layout)
    advantages: Any = [[torch.zeros(len(row.tokens)).numpy() for row in group.rows] for group in batch.groups]
    (passes,) = plan_microbatches(pieces, 1, 57, layout)
    return [collate(batch, rows, advantages, torch.device("cpu")).inputs for rows in passes]


def scored(policy: Policy, kernel: str, has_gradient: bool, shares: int = 1) -> dict[str, Any]:
    """Logprobs and entropies of each pass, and the gradient of their weighted sum as one process would have it."""
    results = []
    with torch.set_grad_enabled(has_gradient):
        for inputs in packs(kernel):
            scores = policy(inputs)
            results.append([score.detach() for score in scores])
            if has_gradient:
                weights = torch.arange(len(inputs.where)).cos()
                ((scores[0] * weights + 0.3 * scores[1]).sum() * shares).backward()
    named = policy.lm.named_parameters() if has_gradient else ()
    return {"scores": results, "gradient": {name: _whole(parameter.grad) for name, parameter in named}}


def _whole(gradient: Any) -> Tensor:
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


def flash_on_cpu(query: Tensor, key: Tensor, value: Tensor, mask: None, **options: Any) -> Tensor:
    """The output of a flash kernel for documents side by side: the last query of each sees its last key.

    Tensors are [1, tokens, heads, D]. As in the kernel nothing but the lengths tells where a document begins.
    """
    assert mask is None and options["is_causal"]
    edges = [options[f"cu_seq_lens_{name}"].tolist() for name in "qk"]
    lengths = [[end - start for start, end in itertools.pairwise(edge)] for edge in edges]
    assert [max(each) for each in lengths] == [options["max_length_q"], options["max_length_k"]]
    assert edges[0][-1] == query.shape[1] and edges[1][-1] == key.shape[1]
    parts = []
    for q, k, v in zip(query.split(lengths[0], 1), key.split(lengths[1], 1), value.split(lengths[1], 1), strict=True):
        sees = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        parts.append(F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), sees, scale=options["softmax_scale"],
            enable_gqa=True,
        ).transpose(1, 2))
    return torch.cat(parts, 1)


def rank_main(rank: int, ranks: int, store_file: str, out: str, cases: list[Case]) -> None:
    """Each rank writes to `out` what `scored` gives for each case; flex attention has no gradient on a CPU."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store_file, ranks), rank=rank, world_size=ranks)
    sequence._flash_attention_forward = flash_on_cpu
    learner = LearnerConfig(prompts_per_step=3, lr=1e-6, sequence_parallel=ranks)
    config = learner_config(learner=learner, placement=PlacementConfig(learner=LearnerPlacement(ranks=ranks)))
    results = {}
    for kernel, exchange in cases:
        policy = split_policy(exchange, kernel)
        shard(policy, open_ranks(config, torch.device("cpu")), config.learner)
        results[kernel, exchange] = scored(policy, kernel, kernel != "flex_attention")
    torch.save(results, Path(out) / f"{rank}.pt")
    dist.destroy_process_group()
