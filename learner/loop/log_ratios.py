"""Records the log importance ratio of every trained token, for the page of the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from async_rl.base.config import Config
from async_rl.base.run_dir.checkpoints import TrainingState
from async_rl.base.run_dir.log_ratio_file import LogRatioWriter, StepLogRatios, link_past
from async_rl.base.types import Batch
from learner.packing import MicroBatch, MiniBatch

Answers = tuple[tuple[int, int], ...]


class LogRatioRecorder:
    """Collects the log importance ratios (proximal - behaviour logprobs) of one rank's trained tokens during a step.

    After the step `write` has a thread write them to files, which async_rl/base/run_dir/log_ratio_file.py describes.

    Args:
        resumed: the state that the run resumes from; the files of its earlier steps are linked. None for a new run.
    """

    def __init__(self, config: Config, rank: int, resumed: TrainingState | None) -> None:
        if resumed and rank == 0:
            link_past(config.run_dir, resumed.lineage, resumed.version)
        self._writer = LogRatioWriter(config.run_dir, rank, config.journal_kept_steps)
        self._keeps_learner = config.algorithm.steps_per_batch > 1
        self._proximal: dict[Answers, Tensor] = {}
        """[rows of a micro-batch] proximal logprobs [N] of the tokens of these rows, NaN where not trained."""
        self._ratios: dict[Answers, Tensor] = {}  # [N] float16
        self._learner: dict[Answers, Tensor] = {}  # [N] float16

    @torch.no_grad()
    def add(
        self, minibatch: MiniBatch, all_logprobs: Sequence[Tensor],
        proximal_of: Callable[[MicroBatch, Tensor], Tensor],
    ) -> None:
        """Collect the logprobs of one forward pass over a minibatch.

        A step may pass over a token several times. The first pass gives its proximal logprob, the last one its learner
        logprob.

        Args:
            all_logprobs: for each micro-batch its learner logprobs [N] in this pass.
            proximal_of: the function that returns the proximal logprobs [N] of (micro-batch, learner logprobs).
        """
        for micro, of_micro in zip(minibatch.micro_batches, all_logprobs, strict=True):
            trained, rows = micro.response.trained, micro.rows
            if not rows:
                continue
            logprobs = torch.where(trained, of_micro, 0.0)
            if rows not in self._proximal:
                self._proximal[rows] = torch.where(trained, proximal_of(micro, logprobs), torch.nan)
                self._ratios[rows] = (self._proximal[rows] - micro.response.behaviour).half()
            if self._keeps_learner:
                self._learner[rows] = (logprobs - self._proximal[rows]).half()

    def write(self, batch: Batch, step: int) -> None:
        """Give the ratios collected in this step to the thread that writes them, and begin with the next step."""
        pairs = [pair for rows in self._ratios for pair in rows]
        if pairs:
            tokens = [len(batch.groups[g].rows[i].tokens) for g, i in pairs]
            self._writer.write(step, StepLogRatios(
                group_ids=np.array([batch.groups[g].group_id for g, _ in pairs], np.int64),
                rows=np.array([i for _, i in pairs], np.int32),
                lengths=np.array(tokens, np.int32),
                proximal=_joined(self._ratios),
                learner=_joined(self._learner) if self._keeps_learner else None,
            ))
        self._proximal, self._ratios, self._learner = {}, {}, {}

    def close(self) -> None:
        self._writer.close()


def _joined(parts: dict[Answers, Tensor]) -> np.ndarray:
    return torch.cat(list(parts.values())).cpu().numpy()
