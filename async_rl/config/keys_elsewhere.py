"""Names that settings have in TRL, verl, prime-rl and transformers, with what a user who looks for them needs here."""

from __future__ import annotations

from collections.abc import Collection

from async_rl.config.keys_of_trl import KEYS_OF_TRL
from async_rl.config.keys_of_verl import key_of_verl, name_of_verl
from async_rl.seams.doc_pages import doc_page

_PYTHON = doc_page("python.md")
_SAMPLING = (
    "there is none, because the logged logprobs would not be those of the distribution that answers are sampled from, "
    "by which staleness is corrected. What there is: rollout.temperature, rollout.top_p, rollout.stop"
)
_SCHEDULE = "the schedule is learner.warmup_steps, learner.decay_fraction, learner.decay and learner.decay_to"
_BATCH = (
    "the batch is learner.prompts_per_step prompts of rollout.group_size answers; learner.max_tokens_per_microbatch is "
    "what goes through the model at once, and gradients add up over the rest"
)
_EPOCHS = "the length is run.steps batches; an epoch of the data has prompts / learner.prompts_per_step of them"
_SPLIT = "weights are split over all ranks by FSDP2 (placement.learner.ranks), rows by learner.sequence_parallel"
_HOOKS = f"callbacks are functions that async_rl.train(..., callbacks=[...]) gets: {_PYTHON}"
_EARLY = f"a callback ends a run by step.run.end(reason): {_PYTHON}. Or set run.seconds"
_QUANTISED = "policies are not quantised. What saves memory: model.lora.rank, learner.offload, learner.optimizer"
_HEAD = "logits are always computed in chunks of tokens; there is nothing to set"
_HUB = "name it in model.path: OWNER/NAME@REVISION"
_NO_CODE = "code that comes with a model is never run: model.path must be of an architecture that transformers has"
_EVAL = "for greedy answers set eval.temperature: 0"
_LOGGERS = "metrics go to run_dir/metrics.jsonl and by logging.wandb, logging.trackio and logging.tensorboard"

KEYS_ELSEWHERE = {
    **KEYS_OF_TRL,
    **dict.fromkeys(("top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"), _SAMPLING),
    **dict.fromkeys(("lr_scheduler_type", "lr_scheduler", "scheduler", "schedule", "lr_schedule", "min_lr"), _SCHEDULE),
    **dict.fromkeys(("lr_scheduler_kwargs", "min_lr_ratio"), _SCHEDULE),
    **dict.fromkeys(
        (
            "gradient_accumulation_steps", "per_device_train_batch_size", "train_batch_size", "ppo_mini_batch_size",
            "ppo_micro_batch_size_per_gpu", "micro_batch_size", "batch_size", "generation_batch_size",
        ),
        _BATCH,
    ),
    **dict.fromkeys(("num_train_epochs", "total_epochs", "max_epochs", "num_epochs"), _EPOCHS),
    **dict.fromkeys(("tensor_parallel", "context_parallel", "pipeline_parallel", "cp", "pp", "tp_size"), _SPLIT),
    **dict.fromkeys(("callbacks", "callback", "hooks"), _HOOKS),
    **dict.fromkeys(("early_stop", "early_stopping", "early_stopping_patience"), _EARLY),
    **dict.fromkeys(("load_in_4bit", "load_in_8bit", "quantization", "quantization_config", "qlora"), _QUANTISED),
    **dict.fromkeys(("use_liger", "use_liger_kernel", "use_liger_loss", "fused_lm_head"), _HEAD),
    **dict.fromkeys(("revision", "model_revision"), _HUB),
    **dict.fromkeys(("greedy", "do_sample", "val_kwargs"), _EVAL),
    **dict.fromkeys(("report_to", "mlflow", "swanlab", "logger"), _LOGGERS),
    "trust_remote_code": _NO_CODE,
    "eps": "arguments of the optimizer belong into learner.optimizer_params: {eps: 1.0e-8}",
    "learning_rate": "it is lr: learner.lr, critic.lr, sft.lr",
    "num_generations": "it is rollout.group_size",
    "max_completion_length": "it is rollout.max_response_tokens",
    "max_prompt_length": "it is task.max_prompt_tokens",
    "output_dir": "it is run.dir, with run.name",
    "dedup": "prompts that are there more than once, or held out and trained on, are told at the start; all stay",
}
"""[the last part of a key that there is not] a sentence for its error, without the full stop."""
OF_SECTION = {
    "run.epochs": _EPOCHS, "learner.epochs": f"{_EPOCHS}. Passes over one batch are algorithm.epochs",
    "learner.tp": _SPLIT, "model.tp": _SPLIT,
    **dict.fromkeys(("beta", "algorithm.beta"), "the coefficient of the KL penalty is algorithm.kl.coef"),
    **dict.fromkeys(("delta", "algorithm.delta", "algorithm.clip.delta"), "it is algorithm.params: {dual: ...}"),
    "data": "prompts are in task.path, and held-out ones in task.eval_path", "eval.n": "it is eval.samples",
    **dict.fromkeys(
        ("eval.max_tokens", "eval.max_response_tokens"), "it is rollout.max_response_tokens, for held-out prompts too"
    ),
    **dict.fromkeys(("max_steps", "run.max_steps", "learner.max_steps"), "it is run.steps"),
}
"""[a whole key] the same, where the name alone could mean something else here."""


def said_elsewhere(key: str, own_names: Collection[str]) -> str:
    """Return the sentence for a key that there is not here but in another package; "" if none of them has it.

    Args:
        own_names: the last parts of this package's keys, which mean what they mean here.
    """
    name = key.rpartition(".")[2]
    if told := OF_SECTION.get(key) or (key_of_verl(key) if "." in key else ""):
        return told
    return KEYS_ELSEWHERE.get(name) or ("" if name in own_names else name_of_verl(name))
