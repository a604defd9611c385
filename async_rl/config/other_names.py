"""Names of settings in TRL, verl, prime-rl, AReaL, NeMo-RL and slime, with what is the same here."""

from __future__ import annotations

_HERE = {
    "it is staleness.max, in policy versions": "max_staleness max_off_policy_steps max_async_level async_level "
    "max_head_offpolicyness staleness_threshold max_off_policy_threshold max_trajectory_age_steps max_staleness_steps "
    "max_steps_off_policy max_lag off_by_n async_steps",
    "it is staleness.late: wait, drop or mask": "max_off_policy_strategy",
    "it is staleness.mode: exact": "strict_async_level",
    "it is staleness.depth, in batches": "sampling_steps_ahead async_queue_size max_inflight_tasks",
    "it is weight_sync.every_steps":
        "weight_sync_steps trigger_parameter_sync_step parameter_sync_step update_weights_interval",
    "it is weight_sync.on_update": "partial_rollout in_flight_weight_updates inflight_updates",
    "it is rollout.group_size, and eval.samples for held-out prompts":
        "n num_generations n_samples_per_prompt rollouts_per_example num_generations_per_prompt",
    "it is rollout.max_response_tokens": "max_completion_length max_response_length max_new_tokens max_tokens",
    "it is task.max_prompt_tokens": "max_prompt_length",
    "it is rollout.mem_fraction": "gpu_memory_utilization vllm_gpu_memory_utilization",
    "it is placement.rollout.tp": "tensor_model_parallel_size tensor_parallel_size vllm_tensor_parallel_size tp_size",
    "it is rollout.engine: vllm": "use_vllm",
    "it is learner.prompts_per_step, in prompts": "train_batch_size batch_size rollout_batch_size num_prompts_per_step "
    "per_device_train_batch_size gradient_accumulation_steps generation_batch_size",
    "it is algorithm.minibatches, a number of parts": "ppo_mini_batch_size num_mini_batches steps_per_generation",
    "it is learner.max_tokens_per_microbatch, in tokens":
        "micro_batch_size ppo_micro_batch_size_per_gpu ppo_max_token_len_per_gpu",
    "it is learner.lr": "learning_rate",
    "the schedule is learner.warmup_steps, learner.decay_fraction and learner.decay":
        "lr_scheduler_type lr_scheduler warmup_ratio lr_warmup_steps min_lr",
    "it is learner.grad_clip": "max_grad_norm",
    "it is algorithm.epochs": "ppo_epochs num_iterations",
    "it is algorithm.clip.low and algorithm.clip.high":
        "epsilon epsilon_high clip_ratio clip_ratio_low clip_ratio_high eps_clip",
    "it is algorithm.kl.coef, with algorithm.kl.kind": "beta kl_loss_coef kl_coef use_kl_loss",
    "it is algorithm.entropy_coef": "entropy_coeff",
    "it is algorithm.advantage": "adv_estimator scale_rewards",
    "it is algorithm.aggregation": "loss_agg_mode loss_type",
    "it is algorithm.correction.kind": "use_tis rollout_is vllm_importance_sampling_correction use_decoupled_loss",
    "it is run.steps, in batches": "max_steps total_training_steps total_epochs num_train_epochs run.epochs",
    "it is run.dir and run.name": "output_dir default_local_dir experiment_name run_name",
    "it is eval.every_steps": "eval_steps test_freq",
    "it is checkpoint.every_steps": "save_steps save_freq",
    "it is task.path and task.eval_path": "train_files val_files train_dataset eval_dataset dataset dataset_name data",
    "it is task.rewards": "reward_funcs reward_weights custom_reward_function",
    "it is model.path, where NAME@REVISION chooses a revision": "model_name_or_path revision model_revision",
    "it is model.lora.rank": "peft_config use_peft lora_r lora_rank",
    "it is model.dtype": "bf16 fp16 torch_dtype",
    "it is learner.offload": "param_offload optimizer_offload",
    "it is learner.sequence_parallel": "context_parallel context_parallel_size ulysses_sequence_parallel_size",
    "it is placement.learner.nodes and placement.learner.gpus_per_node": "nnodes n_gpus_per_node",
    "it is logging.wandb": "report_to logger",
    "there is none: logprobs would not be those of the sampled distribution": "top_k min_p repetition_penalty",
}  # fmt: skip
OTHER_NAMES = {name: said for said, names in _HERE.items() for name in names.split()}
"""[the last part of a key, or a whole key] what the error for it says."""
