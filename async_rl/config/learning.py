"""The sections that say what is trained, and how."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from async_rl.config.check import check


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters in place of the whole policy; servers get, and the run saves, merged weights."""

    rank: int = 0
    """0: off, every weight is trained."""
    alpha: float = 32.0
    """The adapters' output is scaled by alpha / rank."""
    dropout: float = 0.0
    """Of the adapters' input in the gradient's forward pass: above 0 its logprobs are not the served policy's."""
    target_modules: tuple[str, ...] = ()
    """Names such as q_proj; empty: every linear layer but the output head."""

    def __post_init__(self) -> None:
        check(self.rank >= 0, "model.lora.rank", self.rank, "0 (off) or more")
        check(self.alpha > 0, "model.lora.alpha", self.alpha, "above 0")
        check(0 <= self.dropout < 1, "model.lora.dropout", self.dropout, "in [0, 1)")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    path: str
    """Folder of a Hugging Face causal LM (config.json, safetensors, tokenizer)."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute type. auto: bfloat16 on GPUs, float32 on CPU. Master weights are always float32."""
    attn_implementation: Literal["sdpa", "eager", "flex_attention", "flash_attention_2"] = "sdpa"
    """sdpa, eager: rows no wider than the longest answer; flex_attention, flash_attention_2 (GPU only): micro-batches
    without padding."""
    lora: LoraConfig = field(default_factory=LoraConfig)


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
        check(self.lr > 0, "critic.lr", self.lr, "above 0")
        check(self.warmup_steps >= 0, "critic.warmup_steps", self.warmup_steps, "0 or more")
        check(self.value_clip >= 0, "critic.value_clip", self.value_clip, "0 or more")


@dataclass(frozen=True, kw_only=True)
class ReferenceConfig:
    """The frozen model of a KL term; loaded only if there is one."""

    path: str = ""
    """Empty: model.path as it was at the start of the run; with LoRA that is the policy without its adapters."""
    offload: bool = False
    """Keep it in CPU memory between uses (GPU only)."""


@dataclass(frozen=True, kw_only=True)
class RewardModelConfig:
    path: str = ""
    """Folder of a Hugging Face sequence-classification model with one output, the reward. Empty: the worker's rule."""


@dataclass(frozen=True, kw_only=True)
class LearnerConfig:
    prompts_per_step: int = 16
    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    max_tokens_per_microbatch: int = 16_384
    """Tokens one forward/backward holds, padding included."""
    gradient_checkpointing: bool = False
    """Keep only the inputs of each transformer block and compute the rest anew in the backward pass: less memory, a
    third more work."""
    compile: bool = False
    """torch.compile of each transformer block."""
    grad_clip: float = 1.0
    """Largest norm of a step's gradient; .inf: no limit."""
    warmup_steps: int = 0
    """Linear learning-rate warm-up, in optimizer steps."""
    decay_fraction: float = 0.0
    """Over the last such share of run.steps all learning rates go linearly to 0, so that a run does not end on a large
    step; 0: they stay."""
    sharding: Literal["full", "hybrid"] = "full"
    """full: weights, gradients and optimizer state are split over all ranks; hybrid: over those of a node, each with
    a copy of them, so that only gradients travel between nodes."""
    max_skipped_steps: int = 3
    """So many optimizer steps in a row without a finite loss and gradient end the run; fewer are skipped, counted."""

    def __post_init__(self) -> None:
        check(self.prompts_per_step >= 1, "learner.prompts_per_step", self.prompts_per_step, "at least 1")
        check(self.lr > 0, "learner.lr", self.lr, "above 0")
        check(all(0 <= b < 1 for b in self.betas), "learner.betas", self.betas, "two numbers in [0, 1)")
        check(self.weight_decay >= 0, "learner.weight_decay", self.weight_decay, "0 or more")
        check(self.grad_clip > 0, "learner.grad_clip", self.grad_clip, "above 0")
        check(self.warmup_steps >= 0, "learner.warmup_steps", self.warmup_steps, "0 or more")
        check(0 <= self.decay_fraction <= 1, "learner.decay_fraction", self.decay_fraction, "between 0 and 1")
        check(self.max_skipped_steps >= 1, "learner.max_skipped_steps", self.max_skipped_steps, "at least 1")


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
        check(self.target_loss >= 0, "sft.target_loss", self.target_loss, "0 (off) or more")
        check(self.steps >= 1, "sft.steps", self.steps, "at least 1")
        check(self.batch_size >= 1, "sft.batch_size", self.batch_size, "at least 1")
        check(self.lr > 0, "sft.lr", self.lr, "above 0")
