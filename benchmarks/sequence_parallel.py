"""Compares ranks that split rows (learner.sequence_parallel) with one process: numbers, and what each rank keeps.

    python -m benchmarks.sequence_parallel --out benchmarks/results/sequence_parallel

Equality: one `Updater` a rank on a CPU, gloo, float32, on ragged groups with shared prompts; data x sequence ranks
against one process with one micro-batch. Gradients that differ by more than 1e-6 are compared with those of passes in
float64. Memory: one pass over packed documents; what autograd keeps for the backward
pass, without weights and the mask, and the rows of embeddings and head that a rank has at once.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

from async_rl.config import (
    AlgorithmConfig,
    Config,
    KlConfig,
    LearnerConfig,
    LearnerPlacement,
    ModelConfig,
    PlacementConfig,
    RolloutConfig,
    TaskConfig,
)
from async_rl.sweeps.machine import describe_machine, machine_text
from async_rl.sweeps.tables import write_page
from async_rl.types import Batch, Group, Row
from benchmarks.split_rows import (
    ASKED,
    EQUALITY,
    HEADS,
    MEMORY,
    MEMORY_TOKENS,
    MEMORY_VOCAB,
    SplitCase,
    misses_text,
    report,
)
from learner import updater as updater_module
from learner.algorithms.diagnostics import MetricAccumulator
from learner.algorithms.token_advantages import batch_advantages
from learner.models.policy import Policy, open_policy, shard
from learner.packing.microbatches import ForwardInputs
from learner.ranks import open_ranks
from learner.updater import Updater

VOCAB, PROMPT, RESPONSE = 97, 90, 40
EQUALITY_TOKENS = 512
CPU = torch.device("cpu")


def save_model(folder: Path, exchange: str, vocab: int = VOCAB, **changes: int) -> None:
    heads, kv_heads = HEADS[exchange]
    torch.manual_seed(0)
    shape: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "head_dim": 16}
    Qwen3ForCausalLM(Qwen3Config(
        vocab_size=vocab, num_attention_heads=heads, num_key_value_heads=kv_heads, initializer_range=0.1,
        max_position_embeddings=4096, tie_word_embeddings=False, bos_token_id=None, eos_token_id=2, pad_token_id=0,
        **shape | changes,
    )).save_pretrained(folder)


def ragged_batch(seed: int) -> Batch:
    """Four groups of three rows of 1 to RESPONSE tokens, a fifth of them not trained, after prompts to PROMPT."""
    rng = np.random.default_rng(seed)
    groups = []
    for index in range(4):
        rows = []
        for _ in range(3):
            length = int(rng.integers(1, RESPONSE))
            mask = rng.random(length) >= 0.2
            mask[-1] = True
            rows.append(Row(
                tokens=rng.integers(3, VOCAB, length).astype(np.int32), mask=mask, reward=float(rng.random()),
                logprobs=np.where(mask, rng.normal(-4, 0.5, length), 0.0).astype(np.float32),
                versions=np.zeros(length, np.int32), finish_reason="stop",
            ))  # fmt: skip
        prompt = rng.integers(3, VOCAB, int(rng.integers(30, PROMPT))).astype(np.int32)
        groups.append(Group(
            group_id=index, prompt_index=index, start_version=0, temperature=0.8, prompt_tokens=prompt,
            rows=tuple(rows), duration_s=1.0,
        ))  # fmt: skip
    return Batch(version=0, groups=tuple(groups), finished_versions=(0,) * 4)


def configured(folder: Path, case: SplitCase, tokens: int) -> Config:
    """Policy, critic and reference, with an entropy bonus; `tokens` in each pass of the ranks that split rows."""
    return Config(
        model=ModelConfig(path=str(folder)), task=TaskConfig(name="reasoning_gym/chain_sum", max_prompt_tokens=PROMPT),
        rollout=RolloutConfig(group_size=3, max_response_tokens=RESPONSE - 1),
        algorithm=AlgorithmConfig(advantage="gae", entropy_coef=0.01, kl=KlConfig(kind="k2_loss", coef=0.1)),
        learner=LearnerConfig(
            prompts_per_step=4, lr=1e-3, max_tokens_per_microbatch=-(-tokens // case.sequence),
            gradient_checkpointing=case.recomputes, sequence_parallel=case.sequence,
        ),
        placement=PlacementConfig(learner=LearnerPlacement(ranks=case.ranks)),
    )


def equality(folder: Path, case: SplitCase, tokens: int) -> dict[str, Any]:
    """Return logprobs by row, the loss, gradients, and the weights after two optimizer steps of 1e-3."""
    updater = Updater(configured(folder, case, tokens), CPU)
    assert updater.critic is not None
    torch.nn.init.constant_(updater.critic.lm.score.weight.to_local(), 0.1)
    batch = ragged_batch(1)
    packed = updater.pack(batch, batch_advantages(updater.config, batch))
    (mini,) = updater.objective.prepare(updater.at_step_start(packed))
    losses, all_logprobs = updater.forward_backward(mini, MetricAccumulator(), True, True)
    logprobs: dict[Any, Tensor] = {}
    for micro, found in zip(mini.micro_batches, all_logprobs, strict=True):
        logprobs |= dict(zip(micro.rows, found.split(micro.response.lengths), strict=False))
    everyone: list[Any] = [None] * case.ranks
    dist.all_gather_object(everyone, (logprobs, float(losses["policy"])))
    networks: dict[str, nn.Module] = {"policy": updater.policy, "critic": updater.critic}
    named = [(f"{n}.{name}", p) for n, module in networks.items() for name, p in module.named_parameters()]
    gradients = {name: _whole(parameter.grad) for name, parameter in named}
    for optimizer in updater.optimizers.values():
        optimizer.drop()
    for seed in (1, 2):
        updater.update(ragged_batch(seed))
    return {
        "logprobs": {row: found for part, _ in everyone for row, found in part.items()},
        "loss": sum(loss for _, loss in everyone) / case.sequence,
        "gradients": gradients, "weights": {name: _whole(parameter.detach()) for name, parameter in named},
    }


def exact(folder: Path, case: SplitCase, tokens: int) -> dict[str, Any]:
    """Return what `equality` does, of passes in float64; weights and gradients have float32 as ever."""
    with mock.patch.object(updater_module, "serving_dtype", lambda *_: torch.float64):
        return equality(folder, case, tokens)


def _whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def documents(tokens: int) -> ForwardInputs:
    """One row of four documents, of which every token is scored."""
    cuts = [0, tokens // 7, tokens // 2, tokens - tokens // 5, tokens]
    ids = torch.randint(3, VOCAB, (1, tokens), generator=torch.Generator().manual_seed(1))
    segments, positions = torch.zeros(2, 1, tokens, dtype=torch.long), torch.zeros(1, tokens, dtype=torch.long)
    for number, (start, end) in enumerate(itertools.pairwise(cuts)):
        segments[:, :, start:end] = number
        positions[:, start:end] = torch.arange(end - start)
    return ForwardInputs(
        tokens=ids, segments=segments, positions=positions, where=torch.arange(tokens - 1), targets=ids[0, 1:],
        temperature=torch.ones(tokens - 1),
    )


def memory(folder: Path, case: SplitCase, tokens: int) -> dict[str, Any]:
    """Return the bytes that autograd keeps in one pass over `documents`, and those of embeddings and head at hand."""
    config = configured(folder, case, tokens)
    policy = open_policy(config.model, torch.float32)
    shard(policy, open_ranks(config, CPU), config.learner)
    kept: dict[int, int] = {}
    present: dict[nn.Module, int] = {}
    tables = [policy.lm.get_input_embeddings(), policy.lm.get_output_embeddings()]

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        is_mask = tensor.ndim == 4 and tensor.shape[-1] == tokens and not tensor.requires_grad
        if storage.data_ptr() not in weights and not is_mask:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    def note(module: nn.Module, *_: object) -> None:
        for table in tables if case.sequence == 1 else [module]:
            weight: Any = table.weight
            present[table] = (weight.to_local() if isinstance(weight, DTensor) else weight).nbytes
        weights.update(_pointers(policy))

    weights: set[int] = set()
    blocks = list(policy.lm.model.layers)
    for module in (*blocks, *([] if case.sequence == 1 else tables)):
        module.register_forward_pre_hook(note if module in tables or case.sequence == 1 else
                                         lambda *_: weights.update(_pointers(policy)))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logprobs, entropies = policy(documents(tokens))
    (logprobs.sum() + entropies.sum()).backward()
    largest: list[Any] = [None] * case.ranks
    dist.all_gather_object(largest, (sum(kept.values()), sum(present.values())))
    return {"kept_bytes": max(k for k, _ in largest), "table_bytes": max(t for _, t in largest)}


def _pointers(policy: Policy) -> set[int]:
    found = (p.to_local() if isinstance(p, DTensor) else p for p in policy.parameters())
    return {tensor.untyped_storage().data_ptr() for tensor in found}


def rank_main(rank: int, what: str, case: SplitCase, folder: str, tokens: int) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(f"{folder}/store", case.ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=case.ranks)
    function = {"equality": equality, "exact": exact, "memory": memory}[what]
    found = function(Path(folder) / "model", case, tokens)
    if rank == 0:
        torch.save(found, f"{folder}/found.pt")
    dist.destroy_process_group()


def measure(what: str, case: SplitCase, tokens: int, vocab: int = VOCAB, **shape: int) -> dict[str, Any]:
    """Return what the ranks of a case give, each in a process of its own.

    They are spawned: a process that is forked beside threads, as those of tests, can wait for their locks for ever.
    """
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder) / "model", case.exchange, vocab, **shape)
        mp.start_processes(rank_main, (what, case, folder, tokens), nprocs=case.ranks, start_method="spawn")
        found: dict[str, Any] = torch.load(f"{folder}/found.pt", weights_only=False)  # written by rank_main above
        return found


def differences(found: dict[str, Any], whole: dict[str, Any]) -> dict[str, float]:
    """Return the largest differences; that of a gradient is a share of the largest number of its tensor."""

    def largest(name: str) -> float:
        return max(float((found[name][key] - tensor).abs().max()) for key, tensor in whole[name].items())

    return {
        "loss": abs(found["loss"] - whole["loss"]), "logprob": largest("logprobs"),
        "gradient": max(of_gradients(found, whole).values()), "weights": largest("weights"),
    }


def of_gradients(found: dict[str, Any], whole: dict[str, Any]) -> dict[str, float]:
    """Return the largest difference of each tensor's gradient, as a share of its largest number."""
    return {
        name: float((found["gradients"][name] - gradient).abs().max() / gradient.abs().max())
        for name, gradient in whole["gradients"].items()
    }


def missed(found: dict[str, Any], whole: dict[str, Any], truth: dict[str, Any]) -> dict[str, tuple[float, ...]]:
    """Return, of each gradient that differs by more than ASKED, (that, one process and these ranks against `truth`)."""
    between, *against = of_gradients(found, whole), of_gradients(whole, truth), of_gradients(found, truth)
    return {name: (size, *(each[name] for each in against)) for name, size in between.items() if size > ASKED}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/sequence_parallel"), help="the files of the results")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    wholes = {exchange: measure("equality", SplitCase(exchange), 4096) for exchange in HEADS}
    truths = {exchange: measure("exact", SplitCase(exchange), 4096) for exchange in HEADS}
    splits = {exchange: measure("exact", SplitCase(exchange, 2, 2), EQUALITY_TOKENS) for exchange in HEADS}
    in_float64 = max(max(of_gradients(splits[exchange], truths[exchange]).values()) for exchange in HEADS)
    equal, misses = {}, {}
    for case in EQUALITY:
        found, whole = measure("equality", case, EQUALITY_TOKENS), wholes[case.exchange]
        equal[case] = differences(found, whole)
        misses[case] = missed(found, whole, truths[case.exchange])
        print(case, equal[case], flush=True)
    misses = {case: tensors for case, tensors in misses.items() if tensors}
    shape = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "head_dim": 32}
    kept = {}
    for case in MEMORY:
        kept[case] = measure("memory", case, MEMORY_TOKENS, MEMORY_VOCAB, **shape)
        print(case, kept[case], flush=True)
    command = " ".join(["python -m benchmarks.sequence_parallel", *sys.argv[1:]])
    numbers = {
        "command": command, "machine": describe_machine(),
        "equality": [{**case._asdict(), **found} for case, found in equal.items()],
        "memory": [{**case._asdict(), **found} for case, found in kept.items()],
        "missed": [{**case._asdict(), "gradients": tensors} for case, tensors in misses.items()],
    }
    text = misses_text(misses, in_float64) if misses else ""
    write_page(arguments.out, report(equal, kept, f"`{command}`, {machine_text()}.", text), numbers)


if __name__ == "__main__":
    main()
