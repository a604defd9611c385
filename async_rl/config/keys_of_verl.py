"""Keys of verl's configuration with those of this package; docs/from-verl.md has them, too."""

from __future__ import annotations

from collections.abc import Iterable

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_LONG = "task.max_prompt_tokens: longer prompts are left out, never cut"
_NODES = "placement.learner.nodes; servers apart: placement.rollout.nodes"
_GPUS = "placement.learner.gpus_per_node; servers apart: placement.rollout.servers"
_ADVANTAGE = "algorithm.advantage: gae, grpo and others"

KEYS_OF_VERL = {
    "data.train_files": "task.path", "data.val_files": "task.eval_path",
    "data.train_batch_size": "learner.prompts_per_step, in prompts",
    "data.max_prompt_length": "task.max_prompt_tokens", "data.max_response_length": "rollout.max_response_tokens",
    "data.filter_overlong_prompts": _LONG, "data.truncation": _LONG,
    "data.prompt_key": "task.columns.prompt", "data.reward_fn_key": "task.columns.source",
    "data.shuffle": "task.shuffle", "data.seed": "run.seed",
    "actor_rollout_ref.model.path": "model.path",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "learner.gradient_checkpointing",
    f"{_ACTOR}.optim.lr": "learner.lr",
    f"{_ACTOR}.optim.lr_warmup_steps": "learner.warmup_steps",
    f"{_ACTOR}.optim.lr_scheduler_type": "learner.decay_fraction and learner.decay",
    f"{_ACTOR}.optim.weight_decay": "learner.weight_decay",
    f"{_ACTOR}.ppo_mini_batch_size": "algorithm.minibatches, a number of parts",
    f"{_ACTOR}.ppo_micro_batch_size_per_gpu": "learner.max_tokens_per_microbatch, in tokens",
    f"{_ACTOR}.ulysses_sequence_parallel_size": "learner.sequence_parallel",
    f"{_ACTOR}.ppo_epochs": "algorithm.epochs",
    f"{_ACTOR}.clip_ratio": "algorithm.clip.low and algorithm.clip.high",
    f"{_ACTOR}.clip_ratio_low": "algorithm.clip.low", f"{_ACTOR}.clip_ratio_high": "algorithm.clip.high",
    f"{_ACTOR}.clip_ratio_c": "algorithm.params: {dual: ...}",
    f"{_ACTOR}.grad_clip": "learner.grad_clip", f"{_ACTOR}.entropy_coeff": "algorithm.entropy_coef",
    f"{_ACTOR}.loss_agg_mode": "algorithm.aggregation",
    f"{_ACTOR}.use_kl_loss": "algorithm.kl.kind: k2_loss or k3_loss", f"{_ACTOR}.kl_loss_coef": "algorithm.kl.coef",
    f"{_ACTOR}.kl_loss_type": "algorithm.kl.kind",
    f"{_ACTOR}.fsdp_config.param_offload": "learner.offload: all",
    f"{_ACTOR}.fsdp_config.optimizer_offload": "learner.offload: moments",
    f"{_ROLLOUT}.name": "rollout.engine", f"{_ROLLOUT}.n": "rollout.group_size",
    f"{_ROLLOUT}.temperature": "rollout.temperature", f"{_ROLLOUT}.top_p": "rollout.top_p",
    f"{_ROLLOUT}.gpu_memory_utilization": "rollout.mem_fraction",
    f"{_ROLLOUT}.tensor_model_parallel_size": "placement.rollout.tp",
    "actor_rollout_ref.ref.model": "reference.path", "actor_rollout_ref.ref.model.path": "reference.path",
    "actor_rollout_ref.ref.fsdp_config.param_offload": "reference.offload",
    "algorithm.use_kl_in_reward": "algorithm.kl.kind: k1_reward", "algorithm.kl_penalty": "algorithm.kl.kind",
    "algorithm.kl_ctrl.kl_coef": "algorithm.kl.coef", "algorithm.kl_ctrl.type": "algorithm.kl.target, above 0",
    "algorithm.kl_ctrl.target_kl": "algorithm.kl.target", "algorithm.adv_estimator": _ADVANTAGE,
    "critic.optim.lr": "critic.lr", "critic.model.path": "critic.path", "critic.cliprange_value": "critic.value_clip",
    "critic.ppo_epochs": "algorithm.epochs, the actor's and the critic's",
    "critic.ppo_mini_batch_size": "algorithm.minibatches, the actor's and the critic's",
    "trainer.critic_warmup": "critic.warmup_steps", "reward_model.model.path": "reward_model.path",
    "custom_reward_function.path": "task.reward: package.module:function",
    "custom_reward_function.name": "task.reward: package.module:function",
    "trainer.nnodes": _NODES, "trainer.n_gpus_per_node": _GPUS,
    "trainer.total_epochs": "run.steps, the batches of all epochs",
    "trainer.test_freq": "eval.every_steps", "trainer.save_freq": "checkpoint.every_steps",
    "trainer.default_local_dir": "run.dir", "trainer.resume_mode": "run.resume",
    "trainer.logger": "logging.wandb", "trainer.project_name": "logging.project", "trainer.experiment_name": "run.name",
}
"""[a whole key] the key here, with what to know of its value."""


def key_of_verl(key: str) -> str:
    """Return the sentence for a key of verl's, or for the end of one, such as rollout.n; "" if there is none."""
    return _said(name for name in KEYS_OF_VERL if name == key or name.endswith(f".{key}"))


def is_section_of_verl(key: str) -> bool:
    """Return whether verl has keys below this one, or below one that ends so, such as actor.optim."""
    return any(f".{key}." in f".{each}" for each in KEYS_OF_VERL)


def name_of_verl(name: str) -> str:
    """Return the sentence for the last part of a key of verl's, if it is of several words; "" if there is none."""
    return _said(key for key in KEYS_OF_VERL if "_" in name and key.rpartition(".")[2] == name)


def _said(keys: Iterable[str]) -> str:
    here = dict.fromkeys(KEYS_OF_VERL[key] for key in keys)
    return f"it is {' or '.join(here)}" if here else ""
