"""`async-rl reward-model`: trains a reward model on comparisons of answers, in one process."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification

from async_rl.base.config import Config
from async_rl.base.errors import AsyncRLError, ConfigError
from async_rl.base.messages.reports import StepDone
from async_rl.base.models_and_data.model_folder import end_tokens, load_tokenizer
from async_rl.base.models_and_data.model_loading import load_without_weights, usable_positions
from async_rl.base.models_and_data.model_writing import writing
from async_rl.base.telemetry.metrics import Metric
from learner.loop.optimizer import decayed, non_finite
from learner.models.network import open_model, read_weights
from learner.models.reward_model import OFFSET, RewardRow, Scorer, padded_rows

_REPORT_EVERY_STEPS = 20
CALIBRATION_BINS = 10
_WARMUP_FRACTION, _DECAY_FRACTION = 0.05, 0.2


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two or more answers to a prompt, and the pairs with a preferred answer."""

    rows: Sequence[RewardRow]
    """[K] the prompt with each answer."""
    pairs: Sequence[tuple[int, int, float]]
    """(index of the preferred row, index of the other row, margin) of each compared pair."""


@dataclass(frozen=True, slots=True)
class RewardData:
    """The comparisons that a reward model is trained and tested on, and rows that define the reward 0."""

    train: Sequence[Comparison]
    held_out: Sequence[Comparison]
    zero: Sequence[RewardRow]
    """Rows of demonstrations, whose mean reward becomes 0. Empty: there is no offset."""


def train_reward_model(config: Config, data: RewardData, out_dir: Path) -> Iterator[StepDone]:
    """Train a reward model, and save model and tokenizer in `out_dir` as a Hugging Face folder.

    All pairs of a comparison are in one step, and each row is computed once. There is no dropout. The same run.seed
    gives the same model.

    Yields:
        StepDone, with the step as its version, every 20 steps, and with the held-out metrics after each epoch.

    Raises:
        ConfigError: there are no comparisons, a row is longer than the model's positions, the weights of the base are
            not finite, or `out_dir` can't be written.
        AsyncRLError: the trained weights are not finite.
    """
    training = config.reward_training
    if not data.train:
        raise ConfigError(f"reward_training.path {training.path} must have comparisons to train on, got none")
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    scorer = open_scorer(config, device)
    _check_lengths(scorer, data)
    per_epoch = -(-len(data.train) // training.batch_size)
    steps = training.epochs * per_epoch
    optimizer = torch.optim.AdamW(scorer.parameters(), lr=training.lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: lr_factor(done, steps))
    generator = torch.Generator().manual_seed(config.run.seed)
    max_tokens, started_s = config.learner.max_tokens_per_microbatch, time.monotonic()
    step = 0
    for _ in range(training.epochs):
        for indices in torch.randperm(len(data.train), generator=generator).split(training.batch_size):
            step += 1
            batch = [data.train[int(i)] for i in indices]
            metrics = backward(scorer, batch, max_tokens, training.centering)
            nn.utils.clip_grad_norm_(scorer.parameters(), config.learner.grad_clip)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            is_epoch_end = step % per_epoch == 0
            if step % _REPORT_EVERY_STEPS and not is_epoch_end:
                continue
            held_out = _held_out_metrics(scorer, data.held_out, max_tokens) if is_epoch_end else []
            yield StepDone(version=step, metrics=(
                *metrics, *held_out, Metric("reward_model/lr", float(schedule.get_last_lr()[0]), "last"),
                Metric("time/elapsed_s", time.monotonic() - started_s, "last"),
            ))
    if name := non_finite(scorer):
        raise AsyncRLError(
            f"after training the weights are not finite: {name} holds NaN or infinity. Lower reward_training.lr"
        )
    scorer.lm.config.update({OFFSET: _mean_score(scorer, data.zero, max_tokens)})
    _save(scorer, config.reward_training.base or config.model.path, out_dir)


def open_scorer(config: Config, device: torch.device) -> Scorer:
    """Return the model to train, in float32 on `device`. A base without a reward head gets a random one."""
    key = "reward_training.base" if config.reward_training.base else "model.path"
    path, attention = config.reward_training.base or config.model.path, config.model.attn_implementation
    found = load_without_weights("reward_training.base", path, attention).config
    has_head = any(name.endswith("ForSequenceClassification") for name in found.architectures or ())
    if has_head and found.num_labels != 1:
        raise ConfigError(f"{key} {path} must have one output, the reward, got {found.num_labels} labels")
    lm = open_model(
        AutoModelForSequenceClassification, path, torch.float32, num_labels=1, attn_implementation=attention
    )
    if head := getattr(lm, "score", None):
        generator = torch.Generator().manual_seed(config.run.seed)
        lm.stored_weights.start(
            head, lambda shape: torch.randn(shape, generator=generator) / math.sqrt(shape[-1] + 1)
        )
    read_weights(lm, lm, device)
    lm.to(device)  # also the buffers, which `open_model` computes on the CPU
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return Scorer(lm.eval(), dtype)


def _check_lengths(scorer: Scorer, data: RewardData) -> None:
    rows = [row for each in (*data.train, *data.held_out) for row in each.rows]
    longest, positions = max(map(len, (*rows, *data.zero))), usable_positions(scorer.lm)
    if positions and longest > positions:
        raise ConfigError(
            f"reward_training: a prompt with its answer has {longest} tokens, the model {positions} positions. Lower "
            "task.max_prompt_tokens or rollout.max_response_tokens: longer comparisons are left out"
        )


def lr_factor(done: int, steps: int) -> float:
    """Return the factor of the peak learning rate after `done` of `steps` steps.

    It rises to 1 over the first 5 % of the steps, and falls to 0 over the last 20 %.
    """
    return min((done + 1) / max(1.0, _WARMUP_FRACTION * steps), decayed(done, steps, _DECAY_FRACTION))


def bradley_terry(
    preferred: Tensor,  # [n] rewards of the preferred answers
    other: Tensor,  # [n] rewards of the answers to which they were preferred
    margins: Tensor,  # [n] differences of the rewards that are demanded
    weights: Tensor,  # [n]
    centering: float,
) -> Tensor:
    """Return sum_i w_i (-log sigmoid(r_i - r'_i - m_i) + centering (r_i + r'_i)^2), with gradient.

    The Bradley-Terry model: answer i is preferred to answer j with probability sigmoid(r_i - r_j).
    A pair of a ranking of K answers has the weight 1 / (number of its pairs), so that long rankings count no more than
    single pairs. Sources: Ouyang et al. 2022, arXiv 2203.02155, section 3.5; the margin Touvron et al. 2023, arXiv
    2307.09288, section 3.2.2; centering Eisenstein et al. 2023, arXiv 2312.09244.
    """
    losses = -F.logsigmoid(preferred - other - margins)
    if centering:
        losses = losses + centering * (preferred + other).square()
    return (weights * losses).sum()


def comparison_metrics(preferred: Tensor, other: Tensor, weights: Tensor) -> dict[str, float]:
    """Return how well rewards [n] of compared answers agree with the comparisons: four means, weighted by `weights`.

    loss: -log sigmoid(d), where d is the preferred answer's reward minus the other's.
    accuracy: the share with d > 0; d = 0 counts half.
    margin: the mean of d.
    calibration_error: in ten bins of the confidence sigmoid(|d|), from 0.5 to 1, the distance between mean confidence
        and accuracy; the mean over all pairs. Source: Guo et al. 2017, arXiv 1706.04599, section 2.
    """
    d, share = (preferred - other).double(), weights.double() / weights.double().sum()
    right = (d > 0).double() + 0.5 * (d == 0).double()
    confidence = torch.sigmoid(d.abs()).nan_to_num(0.5)  # whoever trains on NaN is told so by the weights
    bins = ((confidence - 0.5) * 2 * CALIBRATION_BINS).long().clamp(max=CALIBRATION_BINS - 1)
    gaps = torch.zeros(CALIBRATION_BINS, dtype=torch.float64).index_add(0, bins, share * (confidence - right))
    return {
        "loss": float((share * -F.logsigmoid(d)).sum()), "accuracy": float((share * right).sum()),
        "margin": float((share * d).sum()), "calibration_error": float(gaps.abs().sum()),
    }


def backward(scorer: Scorer, batch: Sequence[Comparison], max_tokens: int, centering: float) -> list[Metric]:
    """Compute the gradients of the mean loss over the comparisons `batch`, and return loss and accuracy as metrics.

    A forward pass has one or more whole comparisons. Several have at most `max_tokens` tokens, including padding.

    Args:
        centering: the coefficient of `bradley_terry`.
    """
    loss, right = 0.0, 0.0
    for part in _parts(batch, max_tokens):
        preferred, other, margins, weights = _scored(scorer, part)
        of_part = bradley_terry(preferred, other, margins, weights / len(batch), centering)
        of_part.backward()
        loss += of_part.item()
        with torch.no_grad():
            right += comparison_metrics(preferred.cpu(), other.cpu(), weights.cpu())["accuracy"] * len(part)
    return [Metric("reward_model/loss", loss), Metric("reward_model/accuracy", right / len(batch))]


def _parts(comparisons: Sequence[Comparison], max_tokens: int) -> Iterator[list[Comparison]]:
    """Yield the comparisons of each forward pass. Those with the longest rows come first."""
    part: list[Comparison] = []
    width = rows = 0
    for each in sorted(comparisons, key=lambda each: -max(map(len, each.rows))):
        if part and (rows + len(each.rows)) * width > max_tokens:
            yield part
            part, rows = [], 0
        width = width if part else max(map(len, each.rows))
        part.append(each)
        rows += len(each.rows)
    if part:
        yield part


def _scored(scorer: Scorer, part: Sequence[Comparison]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (rewards of the preferred rows, of the other rows, margins, weights) of all compared pairs, [n] each.

    The weights of the pairs of one comparison add up to 1.
    """
    scores = score_rows(scorer, [row for each in part for row in each.rows])
    pairs, start = [], 0
    for each in part:
        pairs += [(start + i, start + j, margin, 1 / len(each.pairs)) for i, j, margin in each.pairs]
        start += len(each.rows)
    preferred, other, margins, weights = zip(*pairs, strict=True)
    as_tensor = lambda values: torch.tensor(values, device=scores.device)  # noqa: E731
    return scores[as_tensor(preferred)], scores[as_tensor(other)], as_tensor(margins), as_tensor(weights)


def score_rows(scorer: Scorer, rows: Sequence[RewardRow]) -> Tensor:
    """Return the model's outputs [B] for the rows."""
    device = scorer.lm.device
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
        scores: Tensor = scorer(*padded_rows(rows, device))
    return scores


@torch.no_grad()
def _held_out_metrics(scorer: Scorer, held_out: Sequence[Comparison], max_tokens: int) -> list[Metric]:
    """Return the metrics `reward_model/held_out_...`, by `comparison_metrics`; [] without held-out comparisons."""
    if not held_out:
        return []
    scored = [_scored(scorer, part) for part in _parts(held_out, max_tokens)]
    preferred, other, _, weights = (torch.cat(parts).cpu() for parts in zip(*scored, strict=True))
    found = comparison_metrics(preferred, other, weights)
    return [Metric(f"reward_model/held_out_{name}", value) for name, value in found.items()]


@torch.no_grad()
def _mean_score(scorer: Scorer, rows: Sequence[RewardRow], max_tokens: int) -> float:
    """Return the mean of the model's outputs for the rows; 0 without rows."""
    parts = _parts([Comparison([row], []) for row in rows], max_tokens)
    scores = [score_rows(scorer, [each.rows[0] for each in part]) for part in parts]
    return float(torch.cat(scores).double().mean()) if scores else 0.0


def _save(scorer: Scorer, base: str, out_dir: Path) -> None:
    """Save the model with the tokenizer of its base.

    A decoder gets a bias of 0 in its head: SGLang has a bias for models of the Qwen family, and would start it at
    random if the file lacks it. The padding token is changed if it also ends answers: transformers would read the
    reward there, one token early.
    """
    lm, tokenizer = scorer.lm, load_tokenizer(base)
    if scorer.reads_last_token and lm.score.bias is None:
        lm.score.bias = nn.Parameter(torch.zeros(1, device=lm.device))
    lm.config.architectures = [type(lm).__name__]
    ends = end_tokens(base)
    if lm.config.pad_token_id is None or lm.config.pad_token_id in ends:
        lm.config.pad_token_id = next((i for i in tokenizer.all_special_ids if i not in ends), None)
    with writing(out_dir):
        lm.save_pretrained(out_dir)
        tokenizer.save_pretrained(out_dir)
