"""The sections that say what is rolled out and what is handed to the learner."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from async_rl.config.check import check

_FLAGS_SET_HERE = ("model-path", "host", "port", "weight-version", "served-model-name", "tp-size")
"""Of SGLang: the pipeline relies on what it sets them to."""


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    name: str = ""
    """`reasoning_gym/<dataset>` or `my_module:MyTask`; empty when `path` names a file."""
    path: str = ""
    """Parquet or JSONL file in verl's schema."""
    eval_path: str = ""
    """Held-out file; for reasoning_gym the held-out set is generated and disjoint from the training set."""
    params: dict[str, Any] = field(default_factory=dict)
    """Passed to the reasoning_gym dataset; a task of your own reads what it needs."""
    size: int = 10_000
    """Training prompts to generate (reasoning_gym only)."""
    reward: str = ""
    """Empty: the task's own verifier. Else gsm8k | gsm8k_flexible | math_verify | package.module:function."""
    max_prompt_tokens: int = 512
    long_prompts: Literal["skip", "refuse"] = "skip"
    """A prompt over max_prompt_tokens is skipped and counted, or refused at start."""
    max_failures: int = 20
    """Groups failing in a row that end the run."""

    def __post_init__(self) -> None:
        check(bool(self.name) != bool(self.path), "task", (self.name, self.path), "one of task.name and task.path")
        check(
            not self.name or self.name.startswith("reasoning_gym/") or ":" in self.name,
            "task.name", self.name, "reasoning_gym/<dataset> or package.module:Class",
            "Use task.path for a Parquet or JSONL file.",
        )
        check(self.max_prompt_tokens >= 1, "task.max_prompt_tokens", self.max_prompt_tokens, "at least 1")
        check(self.size >= 1, "task.size", self.size, "at least 1")
        check(self.max_failures >= 1, "task.max_failures", self.max_failures, "at least 1")


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    engine: Literal["sglang", "hf"] = "sglang"
    group_size: int = 8
    max_response_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    """Below 1 the logged logprobs are not those of the sampling distribution: ratios are biased (the run says so)."""
    concurrency: int = 256
    """Rollout groups one worker keeps in flight at most; admission may keep fewer."""
    mem_fraction: float = 0.6
    """SGLang's --mem-fraction-static on GPUs."""
    server_url: str = ""
    """Of a running SGLang server to take over: it is set back to model.path as version 0, and lives on after the run.
    Empty: the run starts its own. With weight_sync.on_update in_place it must run with --disable-overlap-schedule."""
    server_args: dict[str, Any] = field(default_factory=dict)
    """Further SGLang flags, e.g. {max-running-requests: 512}."""

    def __post_init__(self) -> None:
        check(self.group_size >= 1, "rollout.group_size", self.group_size, "at least 1")
        check(self.max_response_tokens >= 1, "rollout.max_response_tokens", self.max_response_tokens, "at least 1")
        check(self.temperature > 0, "rollout.temperature", self.temperature, "above 0",
               "Greedy rollouts have no spread to learn from.")
        check(0 < self.top_p <= 1, "rollout.top_p", self.top_p, "in (0, 1]")
        check(self.concurrency >= 1, "rollout.concurrency", self.concurrency, "at least 1")
        check(0 < self.mem_fraction < 1, "rollout.mem_fraction", self.mem_fraction, "in (0, 1)")
        taken = [name for name in self.server_args if name.replace("_", "-") in _FLAGS_SET_HERE]
        check(
            not taken, "rollout.server_args", self.server_args, f"without {', '.join(_FLAGS_SET_HERE)}",
            f"async-rl sets these: leave {', '.join(taken)} out.",
        )


@dataclass(frozen=True, kw_only=True)
class StalenessConfig:
    max: int = 0
    """No token older than this many versions is trained on. 0: strict synchrony; 1..N: overlap."""
    mode: Literal["bounded", "exact"] = "bounded"
    """bounded: what a user runs. exact: staleness is exactly `max` from batch `max` on, to isolate the algorithm's
    effect; its utilisation is not the trade-off's."""
    late: Literal["wait", "drop", "mask"] = "wait"
    """A group that would miss its deadline: wait for it; drop it and grant its prompt again (biased to short answers);
    or train on it with the tokens that are too old masked."""

    def __post_init__(self) -> None:
        check(self.max >= 0, "staleness.max", self.max, "0 or more")


@dataclass(frozen=True, kw_only=True)
class BufferConfig:
    max_uses: int = 1
    """Batches a rollout group may be in, all of them within the bound."""
    fresh_fraction: float = 1.0
    """Share of a batch, at least, that no batch held before; the rest are groups used before, as far as there are."""
    journal: bool = True
    """Keep everything in run_dir/trajectories.sqlite, so that the run survives the end of the buffer's process."""
    journal_keep_steps: int = 100
    """Steps for which the tokens of a trained or dropped group stay in the journal; -1: for ever. Where that is less,
    2 * checkpoint.every_steps: a resume needs them. Rewards, lengths and versions of every rollout always stay."""

    def __post_init__(self) -> None:
        check(self.max_uses >= 1, "buffer.max_uses", self.max_uses, "at least 1")
        check(self.journal_keep_steps >= -1, "buffer.journal_keep_steps", self.journal_keep_steps, "-1 or more")
        check(0 < self.fresh_fraction <= 1, "buffer.fresh_fraction", self.fresh_fraction, "in (0, 1]")


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    every_steps: int = 0
    """Held-out evaluation beside training every so many versions; 0: only at start and end. Beside training it keeps
    rollout.concurrency groups in flight, as many as training may; with pin_version all at once."""
    size: int = 256
    samples: int = 1
    pin_version: bool = False
    """An evaluation beside training holds the next push back: all its answers come from one version. Otherwise nothing
    waits, and eval/oldest_version and eval/newest_version tell from which versions they were sampled."""

    def __post_init__(self) -> None:
        check(
            not self.pin_version or self.every_steps >= 1, "eval.pin_version", self.pin_version,
            "false with eval.every_steps 0", "Nothing is evaluated beside training then. Set eval.every_steps.",
        )
        check(self.every_steps >= 0, "eval.every_steps", self.every_steps, "0 or more")
        check(self.size >= 0, "eval.size", self.size, "0 (no evaluation) or more")
        check(self.samples >= 1, "eval.samples", self.samples, "at least 1")

    @property
    def pass_at(self) -> tuple[int, ...]:
        """The k of the measured pass@k: 2, 4, ... and `samples`; none with one sample."""
        powers = (2**i for i in range(1, self.samples.bit_length()))
        return tuple(sorted({*powers, self.samples} - {1}))

    @property
    def metrics(self) -> tuple[str, ...]:
        """What an evaluation measures."""
        names = ["accuracy", "reward", "response_length", "failed", "version", "oldest_version", "newest_version"]
        names += [f"pass_at_{k}" for k in self.pass_at]
        names += [f"avg_at_{self.samples}"] if self.samples > 1 else []
        return tuple(f"eval/{name}" for name in names)
