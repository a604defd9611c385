"""`async-rl sft`: supervised fine-tuning on answers or whole episodes in one process, the warm start before RL."""

from __future__ import annotations

import difflib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, PreTrainedModel

from async_rl.base.config import Config
from async_rl.base.errors import AsyncRLError, ConfigError
from async_rl.base.messages.reports import StepDone
from async_rl.base.models_and_data.model_folder import check_model_folder, load_tokenizer
from async_rl.base.models_and_data.model_loading import load_without_weights
from async_rl.base.models_and_data.model_writing import writing
from async_rl.base.telemetry.metrics import Metric
from learner.loop.optimizer import decayed, non_finite
from learner.models.network import open_model, read_weights
from learner.models.tiny_model import TINY_MODELS, tiny_model

_REPORT_EVERY_STEPS = 20
_RECENT_STEPS = 10
"""The reported loss, which is also compared with sft.target_loss, is the mean over this many steps."""
_MAX_WARMUP_STEPS = 150
_IGNORED = -100
"""The label of tokens that have no loss."""


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One training example: a prompt with its answer, or the conversation of an episode, as tokens and a mask."""

    tokens: Sequence[int]  # [S]
    mask: Sequence[bool]  # [S] True where the token is learned: the answer, or the replies, each with the final eos


def answer_demonstration(prompt: Sequence[int], answer: Sequence[int]) -> Demonstration:
    """Return the training example of a prompt and its answer, which ends with the eos token. The loss is on the answer.
    """
    return Demonstration([*prompt, *answer], [False] * len(prompt) + [True] * len(answer))


def base_tokenizer(config: Config) -> Any:
    """Return the tokenizer of `sft.base`. The examples must be tokenized with it.

    Raises:
        ConfigError: `sft.base` is neither a tiny model nor a folder with a causal LM.
    """
    base = config.sft.base
    if base in TINY_MODELS:
        return TINY_MODELS[base].tokenizer()
    if not Path(base).is_dir():
        nearest = difflib.get_close_matches(base, TINY_MODELS, n=1)
        raise ConfigError(
            f"sft.base must be {' or '.join(TINY_MODELS)}, a Hugging Face folder or OWNER/NAME of the hub, got "
            f"{base!r}: there is no such folder" + (f". Did you mean {nearest[0]}?" if nearest else "")
        )
    check_model_folder(base, key="sft.base")
    load_without_weights("sft.base", base, config.model.attn_implementation)
    return load_tokenizer(base)


def train_sft(config: Config, examples: Sequence[Demonstration], out_dir: Path) -> Iterator[StepDone]:
    """Train `sft.base` on the examples, and save model and tokenizer in `out_dir` as a Hugging Face folder.

    The loss is the mean cross-entropy of a batch's tokens in the examples' masks. Training ends early once the mean
    loss of the last 10 steps is below sft.target_loss. The same run.seed gives the same model.

    Yields:
        StepDone every 20 steps and at the end. Its `version` is the number of SFT steps.

    Raises:
        ConfigError: there are no examples, the weights of sft.base are not finite, or `out_dir` can't be written.
        AsyncRLError: the trained weights are not finite.
    """
    if not examples:
        raise ConfigError("supervised fine-tuning got no examples: choose a task with training prompts")
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    if config.sft.base in TINY_MODELS:
        model = tiny_model(config.sft.base, config.run.seed)
    else:
        attention = config.model.attn_implementation
        model = open_model(AutoModelForCausalLM, config.sft.base, torch.float32, attn_implementation=attention)
        read_weights(model, model, device)
    model.to(device).train()  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.sft.lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: lr_factor(done, config.sft.steps))
    indices = _batches(len(examples), config.sft.batch_size, config.run.seed)
    started_s = time.monotonic()
    losses: list[float] = []
    for step in range(1, config.sft.steps + 1):
        batch = [examples[i] for i in next(indices)]
        losses.append(backward(model, batch, config.learner.max_tokens_per_microbatch))
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.learner.grad_clip)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        recent = losses[-_RECENT_STEPS:]
        loss = sum(recent) / len(recent)
        is_last = step == config.sft.steps or (step >= _RECENT_STEPS and loss < config.sft.target_loss)
        if step % _REPORT_EVERY_STEPS == 0 or is_last:
            yield StepDone(version=step, metrics=(
                Metric("sft/loss", loss),
                Metric("sft/lr", float(schedule.get_last_lr()[0]), "last"),
                Metric("time/elapsed_s", time.monotonic() - started_s, "last"),
            ))
        if is_last:
            break
    if name := non_finite(model):
        raise AsyncRLError(f"after fine-tuning the weights are not finite: {name} holds NaN or infinity. Lower sft.lr")
    with writing(out_dir):
        model.save_pretrained(out_dir)
        base_tokenizer(config).save_pretrained(out_dir)


def lr_factor(done: int, steps: int) -> float:
    """Return the factor of the peak learning rate after `done` of `steps` steps.

    It rises to 1 over the first half of the steps, but at most 150, and falls to 0 over the last fifth. With a shorter
    warm-up a tiny model gets stuck in a plateau.
    """
    warmup = max(1, min(_MAX_WARMUP_STEPS, steps // 2))
    return min((done + 1) / warmup, decayed(done, steps, 0.2))


def _batches(num_examples: int, batch_size: int, seed: int) -> Iterator[list[int]]:
    """Yield the example indices of each batch, endlessly: one epoch after the other, each shuffled by `seed`.

    A batch may take examples of two epochs.
    """
    generator = torch.Generator().manual_seed(seed)
    waiting: list[int] = []
    while True:
        while len(waiting) < batch_size:
            waiting += torch.randperm(num_examples, generator=generator).tolist()
        yield waiting[:batch_size]
        del waiting[:batch_size]


def backward(model: PreTrainedModel, batch: Sequence[Demonstration], max_tokens: int) -> float:
    """Compute the gradients of the mean loss over the tokens in the examples' masks, and return that loss.

    The batch is split into micro-batches of at most `max_tokens` tokens, including padding, but at least one example.
    No attention mask is needed: padding is on the right, where a causal model does not see it.
    """
    num_learned = sum(sum(example.mask) for example in batch)
    by_length = sorted(batch, key=lambda example: len(example.tokens), reverse=True)
    total = 0.0
    while by_length:
        count = max(1, max_tokens // len(by_length[0].tokens))
        rows, by_length = by_length[:count], by_length[count:]
        tokens = pad_sequence([torch.tensor(row.tokens) for row in rows], batch_first=True)
        labels = [torch.tensor(row.tokens).where(torch.tensor(row.mask), _IGNORED) for row in rows]
        targets = pad_sequence(labels, batch_first=True, padding_value=_IGNORED).to(model.device)  # [B, S], like tokens
        first = max(min(row.mask.index(True) for row in rows) - 1, 0)  # earlier logits are not needed
        with torch.autocast(model.device.type, dtype=torch.bfloat16, enabled=model.device.type == "cuda"):
            logits = model(tokens.to(model.device), use_cache=False, logits_to_keep=tokens.shape[1] - first).logits
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].float().flatten(0, 1), targets[:, first + 1 :].flatten(), ignore_index=_IGNORED,
            reduction="sum",
        ) / num_learned
        loss.backward()
        total += loss.item()
    return total
