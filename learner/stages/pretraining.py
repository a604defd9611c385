"""The pretraining term of PPO-ptx: each optimizer step of the policy also trains on some pretraining text.

    L = L_RL - ptx_coef * mean of log p(token) over the tokens of the step's rows of text

Source: Ouyang et al. 2022, arXiv 2203.02155, equation 2 and appendix C.4, where both gradients are accumulated before
the optimizer's step. The logprobs are at temperature 1, even if answers are sampled at another one.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import torch
from torch import Tensor

from async_rl.base.config import Config
from async_rl.base.errors import ConfigError
from async_rl.base.models_and_data.model_folder import load_tokenizer
from async_rl.base.models_and_data.row_files import read_rows
from async_rl.base.telemetry.metrics import Metric
from async_rl.base.types import Batch, Group, IntArray, Row
from learner.algorithms.diagnostics import MetricAccumulator, Totals
from learner.loop.ranks import Ranks
from learner.models.policy import Policy
from learner.packing import Layout, collate, make_pieces, plan_microbatches

_KEY = "task.pretrain_path"


def read_texts(config: Config) -> list[IntArray]:
    """Return the texts of task.pretrain_path as rows of tokens, each of 2 to config.longest_tokens tokens.

    A text ends with the eos token. A longer text is cut into several rows.

    Raises:
        ConfigError: the file can't be read, or has no text.
    """
    path, tokenizer = config.task.pretrain_path, load_tokenizer(config.model.path)
    found = read_rows(path, _KEY, ("text",), _check_columns)
    rows = []
    for number, row in enumerate(found):
        if not isinstance(row["text"], str):
            raise ConfigError(f"{path}, row {number}: text must be text, got {row['text']!r:.80}")
        tokens = np.array([*tokenizer(row["text"])["input_ids"], tokenizer.eos_token_id], np.int32)
        cuts = range(0, len(tokens), config.longest_tokens)
        rows += [tokens[start : start + config.longest_tokens] for start in cuts]
    rows = [row for row in rows if len(row) > 1]  # of a single token nothing can be learned
    if not rows:
        raise ConfigError(f"{_KEY} {path} must have rows with text, got {len(found)} rows without any")
    return rows


def _check_columns(found: Collection[str], where: str) -> None:
    if "text" not in found:
        raise ConfigError(f"{where}: needs the column text; found: {', '.join(found) or 'none'}")


class PretrainingTerm:
    """Computes the pretraining term for the policy of one rank. Every rank reads the same text and trains on its share.

    Args:
        layout: the kinds of packs that the policy can compute.

    Raises:
        ConfigError: task.pretrain_path can't be read, or has no text.
    """

    def __init__(self, config: Config, policy: Policy, ranks: Ranks, layout: Layout, device: torch.device) -> None:
        algorithm = config.algorithm
        self._config = config
        self._coef = algorithm.ptx_coef
        self._rows_per_step = max(1, algorithm.ptx_rows * config.episodes_per_step // algorithm.num_minibatches)
        self._rows = read_texts(config)
        self._policy, self._ranks, self._layout, self._device = policy, ranks, layout, device

    def rows(self, step: int) -> list[int]:
        """Return the indices of the rows of text for the policy's optimizer step `step`, counted from 0.

        Each epoch takes every row once, in a new order. Checkpoints keep the number of steps, so a resumed run
        continues with the next rows.
        """
        count = self._rows_per_step
        places = [divmod(place, len(self._rows)) for place in range(step * count, (step + 1) * count)]
        seed = self._config.run.seed
        orders = {
            epoch: np.random.default_rng([seed, epoch]).permutation(len(self._rows)) for epoch, _ in places
        }
        return [int(orders[epoch][place]) for epoch, place in places]

    def backward(self, step: int, sums: MetricAccumulator) -> Tensor:
        """Add the gradient of the term to the policy's gradients, and return this rank's part of the term. Collective.

        Args:
            step: number of the policy's optimizer step, as for `rows`.
            sums: the sums for metrics; loss and tokens are added.
        """
        groups = tuple(_group(self._rows[index]) for index in self.rows(step))
        batch = Batch(version=0, groups=groups, finished_versions=(0,) * len(groups))
        zeros = [[np.zeros(len(row.tokens), np.float32) for row in group.rows] for group in groups]
        budget, shares = self._config.learner.max_tokens_per_forward, self._ranks.shares
        pieces = make_pieces(groups, [(g, 0) for g in range(len(groups))], budget, 1, self._layout)
        num_tokens = sum(group.num_tokens for group in groups)
        filler = [[min(pieces, key=lambda piece: piece.length)]]  # for a rank with fewer micro-batches
        total = torch.zeros((), device=self._device)
        for packs in plan_microbatches(pieces, shares, budget, self._layout)[self._ranks.share]:
            micro = collate(batch, packs or filler, zeros, self._device, is_trained=bool(packs))
            with self._policy.over_all_tokens():  # the text was not sampled
                logprobs, _ = self._policy(micro.inputs)
            nll = -torch.where(micro.response.trained, logprobs, 0.0).sum()
            term = self._coef * nll / num_tokens
            (term * shares).backward()  # FSDP averages gradients over ranks
            total += term.detach()
            sums.add(ptx_nll=nll, ptx_tokens=micro.response.trained.sum())
        return total

    def metrics(self, totals: Totals) -> list[Metric]:
        """Return the metric `ptx/loss`: mean -log p(token) of the step's pretraining text, in nats. [] without text."""
        tokens = float(totals.get("ptx_tokens", np.zeros(())))
        return [Metric("ptx/loss", float(totals["ptx_nll"]) / tokens, weight=tokens)] if tokens else []


def _group(tokens: IntArray) -> Group:
    """Return a row of text as a group whose prompt is the first token. Its versions are 0, and nothing reads them."""
    count = len(tokens) - 1
    row = Row(
        tokens=tokens[1:], logprobs=np.zeros(count, np.float32), versions=np.zeros(count, np.int32),
        mask=np.ones(count, np.bool_), reward=0.0, finish_reason="stop",
    )
    return Group(
        group_id=0, prompt_index=0, start_version=0, temperature=1.0, prompt_tokens=tokens[:1], duration_s=0.0,
        rows=(row,),
    )
