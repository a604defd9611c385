"""Trains a tiny mixture of experts at exact lags: with routing replayed or not, four corrections, top_p 1 and 0.9.

    python -m benchmarks.exact_grid train --seeds 0,1   adds the cells of these seeds that OUT.csv lacks, one by one
    python -m benchmarks.exact_grid collapse            the same for larger steps at lag 1
    python -m benchmarks.exact_grid_page                writes the page, its tables and its plot from the CSV files

One process, one thread, no Ray: the hf engine's decoding batch samples, and the learner's Updater trains. Batch t is
sampled by version max(0, t - lag). A cell of `one` version is what `staleness.mode: exact` trains on. In a cell of
`two` versions the first tokens of an answer are of version max(0, t - lag) and the others of version t, which computes
the KV of the first anew, as with `on_update: retract`. Then the routing of the first tokens is either as they were
sampled, or as the new version returns it.

Every so many steps the batch is scored before it is trained on, with each routing, so that their importance ratios
are compared on the same tokens. Accuracy is the probability that the policy answers a held-out prompt right, letter by
letter, under the sampling rule of its cell; it has no sampling noise.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import functools
import gc
import itertools
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, PreTrainedModel

from async_rl.base.config import Config, Sampling
from async_rl.base.config.loading import load_config
from async_rl.base.models_and_data.experts import experts_of
from async_rl.base.models_and_data.model_folder import load_tokenizer
from async_rl.base.models_and_data.routing import Routing
from async_rl.base.types import Batch, Group, Prompt, RoutingArray, Row
from learner.loop.updater import Updater
from learner.models.policy import save_policy, whole_parameters
from learner.stages.sft import answer_demonstration, train_sft
from rollout_server.engines.base import GenerationRequest, SampledReply
from rollout_server.engines.hf.batch import DecodingBatch, Narrowing, OpenRequest, sample_tokens
from rollout_server.engines.hf.engine import replace_weights
from rollout_server.rewards.scoring import open_rewards
from rollout_server.tasks.base import Task, open_task
from tests.kit.tiny_moe import save_moe

RESULTS = Path(__file__).parent / "results" / "exact_grid"
MODEL = Path("runs/exact-grid")
SIZES = {
    "hidden_size": 64, "moe_intermediate_size": 64, "num_hidden_layers": 3, "num_experts": 16,
    "num_experts_per_tok": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
STEPS, EVERY = 48, 8
PROMPTS, GROUP_SIZE, MAX_TOKENS = 16, 8, 8
HELD_OUT = 128
CUT = 3
"""In a cell of two versions, the token from which on the newest one samples."""
NUMBERS = ("mean", "var", "abs", "k3", "ess", "new_abs")
ORDER = (((0, 8), ("TIS", "centering", "both")), ((2, 4, 1), ("TIS",)), ((2, 4, 1), ("centering", "both")))
"""Lags and corrections of the cells that are trained first, next and last."""
LR = 5e-4
CORRECTIONS: dict[str, list[str]] = {
    "TIS": ["algorithm.correction.kind=token_tis"],
    "centering": ["algorithm.loss=score_centering", "algorithm.old_logprobs=rollout", "algorithm.params.cap=0"],
    "both": ["algorithm.loss=score_centering", "algorithm.old_logprobs=rollout", "algorithm.params.cap=2"],
    "none": ["algorithm.correction.kind=none"],
    "coupled": ["algorithm.old_logprobs=rollout"],
}
SAMPLING: dict[str, list[str]] = {
    "1": [],
    "0.9, support": ["rollout.top_p=0.9"],
    "0.9, no support": ["rollout.top_p=0.9", "algorithm.support=ignore"],
}


class ExactCell(NamedTuple):
    seed: int
    lag: int
    sampling: str
    correction: str
    routing: str
    """ignore; sampled: each token's own; returned: as the newest version computes it."""
    engine: str = "bfloat16"
    versions: str = "one"
    lr: float = LR

    @property
    def key(self) -> tuple[str, ...]:
        return tuple(map(str, self))


def cells(seeds: Sequence[int]) -> Iterator[ExactCell]:
    """Yield the cells of the grid, those that tell most first: it may be stopped at any time."""
    for lags, corrections in ORDER:
        for seed, lag in itertools.product(seeds, lags):
            for sampling, correction, routing in itertools.product(SAMPLING, corrections, ("sampled", "ignore")):
                if correction == "TIS" or sampling != "0.9, no support":  # centering reads supports
                    yield ExactCell(seed, lag, sampling, correction, routing)
            if lag in (0, 8):
                for routing in ("sampled", "ignore"):
                    yield ExactCell(seed, lag, "1", "TIS", routing, engine="float32")
            if lag and "TIS" in corrections:
                for routing in ("sampled", "returned", "ignore"):
                    yield ExactCell(seed, lag, "1", "TIS", routing, versions="two")


def collapse_cells(seeds: Sequence[int]) -> Iterator[ExactCell]:
    """Yield cells at lag 1 with larger steps, and without correction at lag 0."""
    for seed, lr in itertools.product(seeds, (2 * LR, 4 * LR)):
        for lag, correction in ((1, "none"), (1, "TIS"), (1, "coupled"), (0, "none")):
            yield ExactCell(seed, lag, "1", correction, "ignore", lr=lr)


def warm_model() -> Path:
    """Return the folder of the supervised start, which is made once."""
    if not (MODEL / "model").is_dir():
        config = load_config("configs/quickstart.yaml", [
            f"model.path={save_moe(MODEL / 'base', sharpness=1, **SIZES)}", f"sft.base={MODEL / 'base'}",
        ])
        pairs = open_task(config, load_tokenizer(MODEL / "base")).sft_pairs(4800)
        examples = [answer_demonstration(prompt.tokens.tolist(), answer) for prompt, answer in pairs]
        for done in train_sft(config, examples, MODEL / "model"):
            print("sft", done.version, done.metrics[0].value, flush=True)
    return MODEL / "model"


def config_of(cell: ExactCell, steps: int) -> Config:
    sampling = SAMPLING[cell.sampling]
    if cell.sampling == "1" and cell.correction in ("centering", "both"):  # it reads supports: that of all tokens
        sampling = [f"rollout.top_k={len(load_tokenizer(warm_model()))}"]
    mode = ["staleness.mode=exact", "weight_sync.on_update=drain"]
    return load_config("configs/quickstart.yaml", [
        f"model.path={warm_model()}", "model.dtype=float32", "rollout.engine=hf", f"run.seed={cell.seed}",
        f"run.steps={steps}", f"staleness.max={cell.lag}", *(mode if cell.versions == "one" else []),
        f"rollout.routing={'ignore' if cell.routing == 'ignore' else 'replay'}", f"rollout.group_size={GROUP_SIZE}",
        f"rollout.max_response_tokens={MAX_TOKENS}", f"learner.prompts_per_step={PROMPTS}", f"learner.lr={cell.lr}",
        f"eval.num_prompts={HELD_OUT}", "algorithm.filter_zero_variance=false", *sampling,
        *CORRECTIONS[cell.correction],
    ])  # fmt: skip


@functools.cache
def task_of(seed: int) -> Task:
    """Return the task, the same for all cells of a seed."""
    config = config_of(ExactCell(seed, 0, "1", "TIS", "sampled"), STEPS)
    return open_task(config, load_tokenizer(config.model.path))


class Sampler:
    """The hf engine's decoding batch, whose weights change between two tokens where it is told to."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        experts = experts_of(str(folder))
        assert experts is not None
        self.routing = Routing(self.model, experts)
        self._end = load_tokenizer(folder).eos_token_id

    def load(self, weights: Mapping[str, Tensor]) -> None:
        replace_weights(self.model, {name: weight.to(self.model.dtype) for name, weight in weights.items()})

    @torch.inference_mode()
    def sample(
        self, requests: Sequence[GenerationRequest], served: Mapping[int, tuple[int, Mapping[str, Tensor]]]
    ) -> list[list[SampledReply]]:
        """Return the replies. From token t of all replies on, version and weights are those of `served[t]`."""
        groups = [OpenRequest(request) for request in requests]
        batch = DecodingBatch(self.model, frozenset([self._end]), routing=self.routing)
        for token in range(requests[0].max_tokens):
            if token in served:
                version, weights = served[token]
                self.load(weights)
                batch.retract()
            batch.step(version) if token else batch.add(groups, version)
        return [group.replies for group in groups]

    @torch.inference_mode()
    def returned(self, prompt: Prompt, replies: Sequence[SampledReply]) -> list[RoutingArray]:
        """Return the experts that the model has now for all tokens of each reply: of a server that keeps no record."""
        fed = [np.concatenate([prompt.tokens, reply.tokens[:-1]]) for reply in replies]
        with self.routing.recording() as chosen:
            tokens = pad_sequence([torch.from_numpy(each).long() for each in fed], batch_first=True)
            self.model(input_ids=tokens, use_cache=False)
        experts = chosen().unflatten(0, tokens.shape).numpy().astype(self.routing.experts.dtype)
        return [of_row[: len(row)] for of_row, row in zip(experts, fed, strict=True)]


class Grader:
    """Computes the probability that a policy answers the held-out prompts right."""

    def __init__(self, folder: Path, prompts: Sequence[Prompt]) -> None:
        self._sampler = Sampler(folder, torch.float32)
        tokenizer = load_tokenizer(folder)
        rows = []
        for prompt in prompts:
            answer = [*tokenizer(prompt.question.ground_truth)["input_ids"], tokenizer.eos_token_id]
            rows.append((prompt.tokens.tolist(), answer))
        self._tokens = pad_sequence([torch.tensor(prompt + answer) for prompt, answer in rows], batch_first=True)
        self._where = [(len(prompt) - 1, answer) for prompt, answer in rows]

    @torch.no_grad()
    def accuracy(self, weights: Mapping[str, Tensor], sampling: Sampling) -> float:
        self._sampler.load(weights)
        logits = self._sampler.model(input_ids=self._tokens, use_cache=False).logits.float()
        of_answers = torch.cat([
            z[first : first + len(answer)] for z, (first, answer) in zip(logits, self._where, strict=True)
        ])
        count = len(of_answers)
        rules = (torch.full((count, 1), value) for value in (*sampling[1:], True))
        *_, logprobs = sample_tokens(
            of_answers, torch.ones(count, 1), Narrowing(*rules), torch.zeros(count, 1, dtype=torch.float64)
        )
        right = torch.tensor([token for _, answer in self._where for token in answer])
        sums = logprobs.gather(1, right[:, None])[:, 0].split([len(answer) for _, answer in self._where])
        return float(torch.stack([each.sum().exp() for each in sums]).mean())


@torch.no_grad()
def ratios(updater: Updater, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the log importance ratios [N] of all tokens of a batch under the learner's weights, and their staleness.
    """
    advantages = [[np.zeros(len(row.tokens), np.float32) for row in group.rows] for group in batch.groups]
    (minibatch,) = updater.pack(batch, advantages)
    responses = [micro.response for micro in minibatch.micro_batches]
    found = [updater.policy(micro.inputs)[0] - micro.response.behaviour for micro in minibatch.micro_batches]
    return torch.cat(found).double(), torch.cat([response.staleness for response in responses])


def with_routing(batch: Batch, routings: Sequence[Sequence[RoutingArray | None]]) -> Batch:
    return dataclasses.replace(batch, groups=tuple(
        dataclasses.replace(group, rows=tuple(
            dataclasses.replace(row, routing=routing) for row, routing in zip(group.rows, of_group, strict=True)
        ))
        for group, of_group in zip(batch.groups, routings, strict=True)
    ))  # fmt: skip


def ratio_numbers(name: str, log_w: Tensor, staleness: Tensor) -> dict[str, float]:
    """Return, by `name`, mean and variance of w, mean |log w|, KL (k3) and ESS / tokens of log ratios, and mean |log w|
    of the tokens that the newest version sampled.
    """
    w = log_w.exp()
    ess = w.sum().square() / w.square().sum() / len(w)
    of_new = log_w[staleness == 0].abs().mean()
    numbers = torch.stack([w.mean(), w.var(), log_w.abs().mean(), (w - 1 - log_w).mean(), ess, of_new]).tolist()
    return {f"{name}_{number}": value for number, value in zip(NUMBERS, numbers, strict=True)}


def train(
    cell: ExactCell, steps: int = STEPS, every: int = EVERY, saved: Mapping[int, Path] | None = None
) -> list[dict[str, Any]]:
    """Train one cell; return a row of numbers for each version that is looked at.

    Args:
        saved: {version: the model folder to write it to}.
    """
    config = config_of(cell, steps)
    folder, task = Path(config.model.path), task_of(cell.seed)
    tokenizer, reward = load_tokenizer(folder), open_rewards(config, task)[0].reward.function
    assert reward is not None
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        updater = Updater(config, torch.device("cpu"))
        sampler, grader = Sampler(folder, getattr(torch, cell.engine)), Grader(folder, task.eval_prompts())
        replayer = updater.policy.routing or Routing(updater.policy.lm, sampler.routing.experts)
        updater.policy.routing = replayer  # also without replay, to measure what it would do
        kept: deque[dict[str, Tensor]] = deque(maxlen=cell.lag + 1)
        rows = []
        for version in range(steps + 1):
            kept.append({name: weight.clone() for name, weight in whole_parameters(updater.policy.lm)})
            if saved and version in saved:
                save_policy(updater.policy, folder, saved[version], is_writer=True)
            looks = version % every == 0
            row: dict[str, Any] = {"version": version}
            if looks:
                row["accuracy"] = grader.accuracy(kept[-1], config.rollout.sampling)
                rows.append(row)
            if version == steps:
                break
            old = max(0, version - cell.lag)
            served = {0: (old, kept[0])}
            if cell.versions == "two" and version > old:
                served[CUT] = (version, kept[-1])
            prompts = [task.prompt(version * PROMPTS + i) for i in range(PROMPTS)]
            requests = [
                GenerationRequest(
                    group_id=prompt.index, prompt=prompt, start_version=old, seed=cell.seed, n=GROUP_SIZE,
                    max_tokens=MAX_TOKENS, **config.rollout.sampling._asdict(), wants_support=config.records_support,
                    wants_support_logprobs=config.algorithm.loss_entry.needs_heads, wants_routing=True,
                )
                for prompt in prompts
            ]
            replies = sampler.sample(requests, served)
            check(cell, replies, served, old, version)
            batch = Batch(
                version=version, finished_versions=(old,) * PROMPTS,
                groups=tuple(
                    Group(
                        group_id=prompt.index, prompt_index=prompt.index, start_version=old, duration_s=1.0,
                        temperature=config.rollout.temperature, prompt_tokens=prompt.tokens,
                        rows=tuple(
                            Row(
                                tokens=r.tokens, logprobs=np.minimum(r.logprobs, 0), versions=r.versions,
                                mask=np.ones(len(r.tokens), np.bool_), finish_reason=r.finish_reason,
                                support=r.support, reward=reward(
                                    prompt.question, tokenizer.decode(r.tokens, skip_special_tokens=True)
                                ).score,
                            )
                            for r in of_prompt
                        ),
                    )
                    for prompt, of_prompt in zip(prompts, replies, strict=True)
                ),
            )  # fmt: skip
            routings: dict[str, Any] = {"sampled": [[r.routing for r in of_prompt] for of_prompt in replies]}
            if cell.routing == "returned" or (looks and cell.correction == "TIS" and cell.sampling == "1"):
                routings["returned"] = [sampler.returned(p, r) for p, r in zip(prompts, replies, strict=True)]
            if looks:
                row |= look(updater, replayer, batch, routings, version - old)
            if cell.routing != "ignore":
                batch = with_routing(batch, routings[cell.routing])
            metrics = {metric.key: metric.value for metric in updater.update(batch)}
            if looks:
                row |= {"reward": metrics["reward/mean"], "truncated": metrics["response/truncated_fraction"],
                        "entropy": metrics["policy/entropy"], "grad_norm": metrics["policy/grad_norm"]}  # fmt: skip
        return rows
    finally:
        dist.destroy_process_group()
        gc.collect()  # sharded modules hold each other


def look(
    updater: Updater, replayer: Routing, batch: Batch, routings: Mapping[str, Any], staleness: int
) -> dict[str, float]:
    """Return the ratios of a batch with each routing, and how often the learner's own routers choose other experts."""
    found: dict[str, float] = {"staleness": staleness, **ratio_numbers("ignore", *ratios(updater, batch))}
    for kind, of_kind in routings.items():
        replayer.take_counts()
        found |= ratio_numbers(kind, *ratios(updater, with_routing(batch, of_kind)))
        replayed, differ = replayer.take_counts()
        found[f"{kind}_changed"] = float(differ / replayed)
    if len(routings) > 1:
        pairs = zip(*(itertools.chain.from_iterable(of_kind) for of_kind in routings.values()), strict=True)
        found["unlike"] = float(np.concatenate([(np.sort(a) != np.sort(b)).any(-1).ravel() for a, b in pairs]).mean())
    return found


def check(
    cell: ExactCell, replies: Sequence[Sequence[SampledReply]], served: Mapping[int, Any], old: int, new: int
) -> None:
    """Check that each token has its version, its support and its experts."""
    for reply in itertools.chain.from_iterable(replies):
        expected = np.full(len(reply.tokens), old)
        if CUT in served:
            expected[CUT:] = new
        assert (reply.versions == expected).all(), (cell, reply.versions)
        assert reply.routing is not None and (np.diff(np.sort(reply.routing), axis=-1) > 0).all()  # different experts
        if reply.support is not None:
            starts, ends = reply.support.offsets[:-1], reply.support.offsets[1:]
            assert all(t in reply.support.ids[a:b] for t, a, b in zip(reply.tokens, starts, ends, strict=True))


def add(file: Path, cell: ExactCell, rows: Sequence[Mapping[str, Any]], seconds: float) -> None:
    names = [*ExactCell._fields, "seconds", *FIELDS]
    is_new = not file.exists()
    with file.open("a", newline="") as opened:
        writer = csv.DictWriter(opened, names, lineterminator="\n")
        if is_new:
            writer.writeheader()
        for row in rows:
            numbers = {name: f"{value:.6g}" for name, value in row.items()}
            writer.writerow(cell._asdict() | {"seconds": f"{seconds:.1f}"} | numbers)


FIELDS = [
    "version", "accuracy", "reward", "truncated", "entropy", "grad_norm", "staleness",
    *(f"{kind}_{n}" for kind in ("ignore", "sampled", "returned") for n in NUMBERS),
    "sampled_changed", "returned_changed", "unlike",
]  # fmt: skip


def read(file: Path) -> list[dict[str, str]]:
    if not file.exists():
        return []
    with file.open(newline="") as opened:
        return list(csv.DictReader(opened))


def run(wanted: Iterator[ExactCell], file: Path, steps: int, every: int) -> None:
    """Train those cells that the file lacks."""
    file.parent.mkdir(parents=True, exist_ok=True)
    done = {tuple(row[name] for name in ExactCell._fields) for row in read(file)}
    for cell in wanted:
        if cell.key not in done:
            start = time.process_time()
            rows = train(cell, steps, every)
            seconds = time.process_time() - start
            add(file, cell, rows, seconds)
            print(*cell, f"{rows[0]['accuracy']:.3f} -> {rows[-1]['accuracy']:.3f}, {seconds:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("train", "collapse"))
    parser.add_argument("--seeds", default="0,1")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--every", type=int, default=EVERY)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    seeds = [*map(int, arguments.seeds.split(","))]
    which = {"train": cells, "collapse": collapse_cells}[arguments.what]
    run(which(seeds), arguments.out.with_name(arguments.out.name + ".csv"), arguments.steps, arguments.every)


if __name__ == "__main__":
    main()
