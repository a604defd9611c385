"""The configuration tree: one frozen dataclass per component. Loading and overrides are in configfile.py.

States intent; everything derivable is a property and printed by `async-rl train CONFIG --dry-run`.
Importing this module imports neither torch, ray nor sglang.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from async_rl.errors import ConfigError


def _check(condition: bool, key: str, got: object, allowed: str, hint: str = "") -> None:
    if not condition:
        raise ConfigError(f"{key} must be {allowed}, got {got!r}" + (f". {hint}" if hint else ""))


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    name: str = "run"
    dir: str = "runs"
    seed: int = 0
    steps: int = 100
    """Learner steps (batches) to take in this run."""

    def __post_init__(self) -> None:
        _check(self.steps >= 1, "run.steps", self.steps, "at least 1")
        _check(bool(self.name) and "/" not in self.name, "run.name", self.name, "a folder name without '/'")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    path: str
    """Folder of a Hugging Face causal LM (config.json, safetensors, tokenizer)."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute type. auto: bfloat16 on GPUs, float32 on CPU. Master weights are always float32."""
    attn_implementation: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    name: str = ""
    """`reasoning_gym/<dataset>`; or empty when `path` names a file."""
    path: str = ""
    """Parquet or JSONL file in verl's schema."""
    eval_path: str = ""
    """Held-out file; for reasoning_gym the held-out set is generated and disjoint from the training set."""
    params: dict[str, Any] = field(default_factory=dict)
    """Passed to the reasoning_gym dataset."""
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
        _check(bool(self.name) != bool(self.path), "task", (self.name, self.path), "one of task.name and task.path")
        _check(
            not self.name or self.name.startswith("reasoning_gym/"),
            "task.name", self.name, "reasoning_gym/<dataset>", "Use task.path for a Parquet or JSONL file.",
        )
        _check(self.max_prompt_tokens >= 1, "task.max_prompt_tokens", self.max_prompt_tokens, "at least 1")
        _check(self.size >= 1, "task.size", self.size, "at least 1")
        _check(self.max_failures >= 1, "task.max_failures", self.max_failures, "at least 1")


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    engine: Literal["sglang", "hf"] = "sglang"
    group_size: int = 8
    max_response_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    """Below 1 the logged logprobs are not those of the sampling distribution: ratios are biased (a warning says so)."""
    concurrency: int = 256
    """Rollout groups one worker keeps in flight at most; admission may keep fewer."""
    mem_fraction: float = 0.6
    """SGLang's --mem-fraction-static on GPUs."""
    server_args: dict[str, Any] = field(default_factory=dict)
    """Further SGLang flags, e.g. {max-running-requests: 512}."""

    def __post_init__(self) -> None:
        _check(self.group_size >= 1, "rollout.group_size", self.group_size, "at least 1")
        _check(self.max_response_tokens >= 1, "rollout.max_response_tokens", self.max_response_tokens, "at least 1")
        _check(self.temperature > 0, "rollout.temperature", self.temperature, "above 0",
               "Greedy rollouts have no spread to learn from.")
        _check(0 < self.top_p <= 1, "rollout.top_p", self.top_p, "in (0, 1]")
        _check(self.concurrency >= 1, "rollout.concurrency", self.concurrency, "at least 1")
        _check(0 < self.mem_fraction < 1, "rollout.mem_fraction", self.mem_fraction, "in (0, 1)")


@dataclass(frozen=True, kw_only=True)
class StalenessConfig:
    max: int = 0
    """No token older than this many versions is trained on. 0: strict synchrony; 1..N: overlap."""

    def __post_init__(self) -> None:
        _check(self.max >= 0, "staleness.max", self.max, "0 or more")


@dataclass(frozen=True, kw_only=True)
class ClipConfig:
    low: float = 0.2
    high: float = 0.28
    dual: float = 3.0
    """Dual clip: bounds the loss of a negative-advantage token at dual * |A|. 0 turns it off."""

    def __post_init__(self) -> None:
        _check(0 < self.low <= 1, "algorithm.clip.low", self.low, "in (0, 1]")
        _check(self.high > 0, "algorithm.clip.high", self.high, "above 0")
        _check(self.dual == 0 or self.dual > 1, "algorithm.clip.dual", self.dual, "0 (off) or above 1")


@dataclass(frozen=True, kw_only=True)
class CorrectionConfig:
    kind: Literal["auto", "none", "token_tis"] = "auto"
    """auto: none at staleness.max 0, token_tis above."""
    cap: float = 2.0

    def __post_init__(self) -> None:
        _check(self.cap > 0, "algorithm.correction.cap", self.cap, "above 0")


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    advantage: Literal["grpo", "gae"] = "grpo"
    """grpo: group-normalised reward, no critic. gae: PPO with a separate critic."""
    gamma: float = 1.0
    lam: float = 0.95
    clip: ClipConfig = field(default_factory=ClipConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    epochs: int = 1
    minibatches: int = 1
    """Optimizer steps per batch are epochs * minibatches."""

    def __post_init__(self) -> None:
        _check(0 < self.gamma <= 1, "algorithm.gamma", self.gamma, "in (0, 1]")
        _check(0 <= self.lam <= 1, "algorithm.lam", self.lam, "in [0, 1]")
        _check(self.epochs >= 1, "algorithm.epochs", self.epochs, "at least 1")
        _check(self.minibatches >= 1, "algorithm.minibatches", self.minibatches, "at least 1")


@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    path: str = ""
    """Empty: starts from model.path with a fresh value head."""
    lr: float = 1e-5
    warmup_steps: int = 0
    """Steps that train the critic alone before the policy moves."""
    value_clip: float = 0.2
    """0 turns value clipping off."""

    def __post_init__(self) -> None:
        _check(self.lr > 0, "critic.lr", self.lr, "above 0")
        _check(self.warmup_steps >= 0, "critic.warmup_steps", self.warmup_steps, "0 or more")
        _check(self.value_clip >= 0, "critic.value_clip", self.value_clip, "0 or more")


@dataclass(frozen=True, kw_only=True)
class LearnerConfig:
    prompts_per_step: int = 16
    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    max_tokens_per_microbatch: int = 16_384
    """Padded tokens (sequences * longest) one forward/backward holds."""
    grad_clip: float = 1.0
    warmup_steps: int = 0
    """Linear learning-rate warm-up, in optimizer steps."""

    def __post_init__(self) -> None:
        _check(self.prompts_per_step >= 1, "learner.prompts_per_step", self.prompts_per_step, "at least 1")
        _check(self.lr > 0, "learner.lr", self.lr, "above 0")
        _check(all(0 <= b < 1 for b in self.betas), "learner.betas", self.betas, "two numbers in [0, 1)")
        _check(self.weight_decay >= 0, "learner.weight_decay", self.weight_decay, "0 or more")
        _check(self.grad_clip > 0, "learner.grad_clip", self.grad_clip, "above 0")
        _check(self.warmup_steps >= 0, "learner.warmup_steps", self.warmup_steps, "0 or more")


@dataclass(frozen=True, kw_only=True)
class WeightSyncConfig:
    transport: Literal["auto", "nccl", "gloo", "disk"] = "auto"
    """auto: gloo on CPU, nccl where learner and servers have GPUs of their own, disk where they share one."""
    every_steps: int = 1
    bucket_bytes: int = 512 * 2**20
    verify: bool = True
    """After the first push, compare the server's logprobs of a probe text with the learner's."""

    def __post_init__(self) -> None:
        _check(self.every_steps >= 1, "weight_sync.every_steps", self.every_steps, "at least 1")
        _check(self.bucket_bytes >= 1024, "weight_sync.bucket_bytes", self.bucket_bytes, "at least 1024")


@dataclass(frozen=True, kw_only=True)
class LearnerPlacement:
    ranks: int = 1

    def __post_init__(self) -> None:
        _check(self.ranks >= 1, "placement.learner.ranks", self.ranks, "at least 1")


@dataclass(frozen=True, kw_only=True)
class RolloutPlacement:
    servers: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        _check(self.servers >= 1, "placement.rollout.servers", self.servers, "at least 1")
        _check(self.tp >= 1, "placement.rollout.tp", self.tp, "at least 1")


@dataclass(frozen=True, kw_only=True)
class PlacementConfig:
    learner: LearnerPlacement = field(default_factory=LearnerPlacement)
    rollout: RolloutPlacement = field(default_factory=RolloutPlacement)


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    every_steps: int = 0
    """Held-out evaluation beside training every so many versions; 0: only at start and end."""
    size: int = 256
    samples: int = 1

    def __post_init__(self) -> None:
        _check(self.every_steps >= 0, "eval.every_steps", self.every_steps, "0 or more")
        _check(self.size >= 0, "eval.size", self.size, "0 (no evaluation) or more")
        _check(self.samples >= 1, "eval.samples", self.samples, "at least 1")


@dataclass(frozen=True, kw_only=True)
class SftConfig:
    base: str = "tiny-qwen2"
    """tiny-qwen2 | tiny-llama (built from config with a character tokenizer), or a Hugging Face folder."""
    steps: int = 200
    batch_size: int = 128
    lr: float = 2e-3
    target_loss: float = 0.0
    """Ends early once the mean loss of the last steps, in nats a token, is below."""

    def __post_init__(self) -> None:
        _check(self.target_loss >= 0, "sft.target_loss", self.target_loss, "0 (off) or more")
        _check(self.steps >= 1, "sft.steps", self.steps, "at least 1")
        _check(self.batch_size >= 1, "sft.batch_size", self.batch_size, "at least 1")
        _check(self.lr > 0, "sft.lr", self.lr, "above 0")


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    wandb: Literal["auto", "online", "offline", "disabled"] = "auto"
    """auto: online when the user is logged in, else off."""
    project: str = "async-rl"


@dataclass(frozen=True, kw_only=True)
class TimeoutsConfig:
    """One per named wait, in seconds."""

    server_start_s: float = 600.0
    join_s: float = 120.0
    """Processes finding each other: torch.distributed, weight group, buffer."""
    generate_s: float = 1800.0
    """One group at the engine."""
    reward_s: float = 30.0
    """One call of the reward function."""
    batch_s: float = 1800.0
    """The learner waiting for a batch."""
    push_s: float = 300.0
    """One weight push."""
    wire_s: float = 30.0
    """One request to the buffer."""
    shutdown_s: float = 30.0

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            _check(getattr(self, name) > 0, f"timeouts.{name}", getattr(self, name), "above 0")


@dataclass(frozen=True, kw_only=True)
class Config:
    model: ModelConfig
    task: TaskConfig
    run: RunConfig = field(default_factory=RunConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    staleness: StalenessConfig = field(default_factory=StalenessConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    weight_sync: WeightSyncConfig = field(default_factory=WeightSyncConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    timeouts: TimeoutsConfig = field(default_factory=TimeoutsConfig)

    def __post_init__(self) -> None:
        needed = self.weight_sync.every_steps * self.learner.prompts_per_step
        _check(
            self.max_slots >= needed, "(staleness.max + 1) * learner.prompts_per_step", self.max_slots,
            f"at least weight_sync.every_steps * learner.prompts_per_step = {needed}",
            f"Otherwise the learner waits for ever. Set staleness.max >= {self.weight_sync.every_steps - 1} "
            f"or weight_sync.every_steps <= {self.staleness.max + 1}.",
        )
        ranks, parts = self.placement.learner.ranks, self.algorithm.minibatches
        _check(
            self.rollouts_per_step >= parts * ranks, "algorithm.minibatches", parts,
            f"at most {self.rollouts_per_step} rollouts per step / {ranks} learner ranks",
        )
        _check(
            self.algorithm.advantage != "grpo" or self.rollout.group_size >= 2, "rollout.group_size",
            self.rollout.group_size, "at least 2 with algorithm.advantage grpo", "Or set algorithm.advantage: gae.",
        )
        _check(
            self.learner.max_tokens_per_microbatch >= self.longest_tokens, "learner.max_tokens_per_microbatch",
            self.learner.max_tokens_per_microbatch,
            f"at least task.max_prompt_tokens + rollout.max_response_tokens = {self.longest_tokens}",
        )

    @property
    def run_dir(self) -> Path:
        return Path(self.run.dir) / self.run.name

    @property
    def rollouts_per_step(self) -> int:
        return self.learner.prompts_per_step * self.rollout.group_size

    @property
    def longest_tokens(self) -> int:
        """Of a prompt with its answer."""
        return self.task.max_prompt_tokens + self.rollout.max_response_tokens

    @property
    def max_slots(self) -> int:
        """Rollout groups admitted and not yet superseded by served weights (design.md section 5)."""
        return (self.staleness.max + 1) * self.learner.prompts_per_step

    @property
    def correction_kind(self) -> Literal["none", "token_tis"]:
        if self.algorithm.correction.kind == "auto":
            return "token_tis" if self.staleness.max > 0 else "none"
        return self.algorithm.correction.kind
