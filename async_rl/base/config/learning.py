"""The sections model, critic, reference, reward_model, reward_training, learner and sft of the configuration."""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from async_rl.base.config.check import check
from async_rl.base.config.section import List, PathText, Section, Unbounded, section

if TYPE_CHECKING:
    from async_rl.base.config.data import EvalConfig
    from async_rl.base.config.system import PlacementConfig

Share = Annotated[float, Field(ge=0, lt=1)]


@section("model.lora")
class LoraConfig:
    """Low-rank adapters that are trained instead of the whole policy. Servers and the saved model get merged weights.
    """

    rank: NonNegativeInt = 0
    """The rank of the adapters. 0: off, every weight is trained."""
    alpha: PositiveFloat = 32.0
    """The adapters' output is scaled by alpha / rank."""
    dropout: Share = 0.0
    """The dropout of the adapters' input in the forward pass of the gradient. Above 0 the logprobs of that pass
    differ from the served policy's."""
    target_modules: List[tuple[str, ...]] = ()
    """The layers that get adapters, by names such as q_proj. Empty: every linear layer except the output head."""


@section("model")
class ModelConfig:
    """The policy: its folder, number type, attention and adapters."""

    path: PathText
    """A Hugging Face causal language model: its folder (config.json, safetensors, tokenizer) or, if there is no such
    folder, its name on the hub, OWNER/NAME or OWNER/NAME@REVISION. hf://OWNER/NAME always means the hub."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """The type of the model's computations. auto: bfloat16 on GPUs, float32 on CPU. Master weights are always float32.
    """
    attn_implementation: Literal["sdpa", "eager", "flex_attention", "flash_attention_2"] = "sdpa"
    """The learner's attention. sdpa and eager pad rows to the longest answer; flex_attention and flash_attention_2
    (GPU only) compute micro-batches without padding."""
    lora: Section[LoraConfig] = field(default_factory=LoraConfig)
    frozen: List[tuple[str, ...]] = ()
    """Name patterns of weights that are not trained, such as model.embed_tokens.* or model.layers.?.*. They do not
    affect the critic or weight pushes."""

    def __post_init__(self) -> None:
        check(
            not (self.frozen and self.lora.rank), "model.frozen", list(self.frozen), "empty with model.lora.rank",
            "Adapters leave all other weights frozen: choose where they are by model.lora.target_modules.",
        )


@section("critic")
class CriticConfig:
    """The model that estimates values. It exists only if algorithm.advantage needs it (gae, vtrace)."""

    path: PathText = ""
    """The model that the critic starts from, by its folder or its name on the hub. It must have the policy's
    vocabulary, because it reads the policy's tokens. Empty: model.path, with a new value head."""
    lr: PositiveFloat = 1e-5
    """The critic's learning rate."""
    warmup_steps: NonNegativeInt = 0
    """Steps at the start that train only the critic."""
    value_clip: NonNegativeFloat = 0.2
    """Values are clipped to this distance from the values at the start of the step. 0 turns clipping off."""


@section("reference")
class ReferenceConfig:
    """The frozen model of the KL term; it is loaded only if algorithm.kl.kind needs it."""

    path: PathText = ""
    """The reference model, by its folder or its name on the hub. It must have the policy's vocabulary, because it
    reads the policy's tokens. Empty: model.path as it was at the start of the run; with LoRA, the policy without its
    adapters."""
    offload: bool = False
    """Keep the reference in CPU memory between uses (GPU only)."""


@section("reward_model")
class RewardModelConfig:
    """A model that scores answers instead of the task's rewards, or in addition to them."""

    path: PathText = ""
    """The reward model, by its folder or its name on the hub: a sequence-classification model with one output, the
    reward. `async-rl reward-model` trains one. Empty: only the task's rewards."""
    task_weight: float = 0.0
    """The weight of the task's rewards: an answer's reward is the model's plus this weight times the task's. 0: the
    task's rewards are not trained on, and are the gold rewards of held-out answers."""

    def __post_init__(self) -> None:
        check(
            bool(self.path) or not self.task_weight, "reward_model.task_weight", self.task_weight,
            "0 without reward_model.path", "The rewards of the task have weights in task.rewards.",
        )

    @property
    def leaves_task_out(self) -> bool:
        """Whether a reward model scores answers and the task's rewards are not trained on."""
        return bool(self.path) and not self.task_weight


@section("reward_training")
class RewardTrainingConfig:
    """The training of a reward model from comparisons between answers, by `async-rl reward-model`."""

    base: PathText = ""
    """The model to start from, by its folder or its name on the hub. A missing reward head is added. Empty: model.path.
    """
    path: PathText = ""
    """The comparisons, a Parquet or JSONL file or a data set of the hub. Its columns are `prompt`, `chosen` and
    `rejected`, and optionally `margin`; or `prompt` and `answers`, the best first, and optionally `ranks` if some are
    equally good."""
    eval_path: PathText = ""
    """The held-out comparisons. Empty: a part of `path`."""
    held_out: Share = 0.1
    """The share of the comparisons in `path` that is held out if `eval_path` is empty. All comparisons of a prompt
    are either held out or not."""
    epochs: PositiveInt = 1
    """The number of passes over the comparisons. With more than one the model soon overfits."""
    batch_size: PositiveInt = 64
    """Comparisons in a step; each has two or more answers."""
    lr: PositiveFloat = 1e-5
    """The peak learning rate. It rises over the first twentieth of the steps, and falls over the last fifth."""
    centering: NonNegativeFloat = 0.0
    """The coefficient of the square of the sum of two compared rewards, which keeps rewards near 0, e.g. 0.01."""
    zero_at: Literal["demonstrations", "comparisons", "none"] = "demonstrations"
    """The answers whose mean reward becomes 0, by an offset in the model's config.json: those that `async-rl sft`
    would learn, or all that were compared."""


FULL_LR = 1e-6
"""The default learning rate of a model with at least 1e9 weights that are all trained."""


def default_lr(weights: int, *, has_adapters: bool) -> float:
    """Return the policy's learning rate if learner.lr is auto, rounded to two digits.

        1e-6 * max(1, (1e9 / weights) ** 0.7), and ten times as much for adapters

    1e-6 is the usual rate for RL of models with 1 to 70 B weights (verl, TRL and DAPO: 1e-6). The exponent connects it
    with what was measured here: a model of 0.3 M weights learns at 3e-4, and at 1e-3 collapses in some runs
    (docs/results/index.md). Between the two it gives 4e-6 at 135 M and 1.6e-6 at 0.5 B, inside the ranges that others
    use there. Adapters learn best at about ten times the rate for all weights, in RL as in supervised training, at any
    rank (Schulman et al. 2025, LoRA Without Regret).
    """
    rate = FULL_LR * max(1.0, (1e9 / weights) ** 0.7) * (10 if has_adapters else 1)
    return float(f"{rate:.1e}")


@section("learner")
class LearnerConfig:
    """The optimizer, the sizes of a batch and of a forward pass, and how the weights are sharded."""

    prompts_per_step: PositiveInt = 16
    """Groups in a batch."""
    lr: PositiveFloat | Literal["auto"] = "auto"
    """The policy's learning rate. auto: computed from the number of the model's weights, ten times as much for
    adapters (see docs/how-to/watcher.md); `async-rl train CONFIG --dry-run` shows it."""
    optimizer: str = "AdamW"
    """The optimizer of policy and critic: a name in torch.optim, such as Adam or SGD, or module:name of a class or
    function. It is called with (parameters, lr=..., **optimizer_params), and returns a torch.optim.Optimizer."""
    optimizer_params: Section[dict[str, Any]] = field(default_factory=dict)
    """Further arguments of the optimizer, such as {eps: 1.0e-6} or {momentum: 0.9}."""
    betas: List[tuple[Share, Share]] = (0.9, 0.999)
    """The betas of AdamW. Another optimizer gets its own in `optimizer_params`."""
    weight_decay: NonNegativeFloat = 0.0
    """The weight decay of the optimizer. It does not apply to biases and norms, the weights with one dimension."""
    ema_decay: Share = 0.0
    """The decay of a moving average of the policy's weights, e.g. 0.99 for a mean over about 100 optimizer steps.
    The average answers held-out prompts and is saved in run_dir/model, run_dir/models and by `async-rl export`.
    Training continues with the weights themselves, and checkpoints have both. 0: no average."""
    max_tokens_per_microbatch: PositiveInt = 16_384
    """The most tokens in one forward and backward pass of a rank, padding included."""
    gradient_checkpointing: Literal["auto"] | bool = "auto"
    """Keep only the inputs of each transformer block and recompute the rest in the backward pass: less memory, a
    third more work. auto: only if a full micro-batch would not fit otherwise, computed at the start from the free
    memory. The results of training do not depend on it."""
    offload: Literal["none", "moments", "all"] = "none"
    """What is kept in CPU memory, for policy and critic. moments: AdamW's two moments, which are copied to the GPU
    for each optimizer step, one weight at a time. all: weights, gradients and moments; the optimizer then computes on
    the CPU. Without a GPU it changes only the time."""
    compile: bool = False
    """Compile each transformer block with torch.compile."""
    grad_clip: Annotated[Unbounded, Field(gt=0)] = 1.0
    """The largest norm of a step's gradient; .inf: no limit."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps over which the learning rate rises linearly."""
    lr_by_ess: Literal["off", "token", "sequence"] = "off"
    """Multiply the policy's learning rate on a batch by sqrt(ESS/N) of its importance weights, of tokens or of whole
    rows. A batch dominated by few samples then takes a smaller step (VCPO). No gain from it has been shown yet."""
    lr_decay_fraction: Annotated[float, Field(ge=0, le=1)] = 0.0
    """The last share of run.steps, over which learning rates fall, so that no run ends on a large step. 0: no decay."""
    lr_decay: Literal["linear", "cosine"] = "linear"
    """The shape of the decay. With lr_decay_fraction 1 and warmup_steps, cosine is the usual cosine schedule."""
    lr_decay_to: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """The decay ends at this share of the learning rate."""
    sharding: Literal["full", "hybrid"] = "full"
    """full: weights, gradients and optimizer state are split over all ranks. hybrid: they are split over the ranks of
    a node and copied to each node, so that only gradients travel between nodes."""
    sequence_parallel: PositiveInt = 1
    """The number of ranks that split each row, for rows that are too long for one GPU. These ranks train on the same
    rows, so a batch is divided by ranks / sequence_parallel; they split output head and embeddings too. It must divide
    the number of ranks on a node."""
    max_skipped_steps: PositiveInt = 3
    """An optimizer step whose loss or gradient is not finite is skipped and counted. This many in a row end the run."""

    def __post_init__(self) -> None:
        check(
            ":" in self.optimizer or self.optimizer.isidentifier(), "learner.optimizer", self.optimizer,
            "a name in torch.optim, or module:name",
        )
        check(
            self.offload in self.offloads, "learner.offload", self.offload,
            f"{' or '.join(self.offloads)} with learner.optimizer {self.optimizer}",
            "Only AdamW's moments are moved one at a time.",
        )
        check(
            self.optimizer == "AdamW" or self.betas == (0.9, 0.999), "learner.betas", self.betas,
            f"as by default with learner.optimizer {self.optimizer}", "Give them in learner.optimizer_params.",
        )
        own = {"lr", "params", "weight_decay", *(("betas",) if self.optimizer == "AdamW" else ())}
        check(
            not own & set(self.optimizer_params), "learner.optimizer_params", dict(self.optimizer_params),
            f"without {', '.join(sorted(own))}", "These are keys of the section learner.",
        )

    @property
    def offloads(self) -> tuple[str, ...]:
        """The values of `offload` that work with the optimizer."""
        return ("none", "moments", "all") if self.optimizer == "AdamW" else ("none", "all")

    @property
    def max_tokens_per_forward(self) -> int:
        """The most tokens in one forward pass of all ranks that split the same rows together."""
        return self.max_tokens_per_microbatch * self.sequence_parallel


def check_average(learner: LearnerConfig, evaluation: EvalConfig, placement: PlacementConfig) -> None:
    """Check that the average weights (learner.ema_decay), if evaluated during training, have servers of their own."""
    beside = evaluation.num_prompts > 0 and evaluation.every_steps > 0
    check(
        not learner.ema_decay or not beside or placement.eval.servers > 0, "learner.ema_decay", learner.ema_decay,
        "0 with eval.every_steps and without placement.eval.servers",
        "Rollout servers hold the weights that are trained, not their average. Set placement.eval.servers: 1, or "
        "eval.every_steps: 0, with which only the start and the end are evaluated.",
    )


@section("sft")
class SftConfig:
    """The supervised fine-tuning by `async-rl sft`, which creates model.path before RL."""

    base: PathText = "tiny-qwen2"
    """The model to start from: tiny-qwen2, tiny-llama or tiny-qwen3 (new models with a character tokenizer; the last
    one has heads that vLLM supports), tiny-qwen3-tools (the same with a chat template for tools, in the form of
    Qwen2.5's), or a Hugging Face model, by its folder or its name on the hub."""
    steps: PositiveInt = 200
    """The largest number of optimizer steps."""
    batch_size: PositiveInt = 128
    """The number of examples in a step."""
    lr: PositiveFloat = 2e-3
    """The learning rate."""
    target_loss: NonNegativeFloat = 0.0
    """Training ends early once the mean loss of the last steps, in nats a token, is below this. 0: it takes all
    `steps`."""
    oracle: str = ""
    """A function that plays demonstrations of task.env, task.agent or task.tools: package.module:function. It takes
    the messages so far and a random.Random, and returns the text of a reply, including its tool calls. Empty: the model
    learns the task's reference answers."""
