"""Names of TRL's settings and of its trainer's arguments, with what they are here; docs/from-trl.md has them, too.

A name that is also one of this package's settings, such as temperature, is not among them.
"""

from __future__ import annotations

from async_rl.seams.doc_pages import doc_page

_OF_SENTENCE = {
    "it is task.path, and task.eval_path for held-out prompts": "train_dataset eval_dataset dataset dataset_name",
    "it is model.dtype and model.attn_implementation": "model_init_kwargs",
    "the tokenizer is that of model.path": "processing_class",
    "adapters are model.lora.rank, model.lora.alpha and model.lora.target_modules":
        "peft_config use_peft lora_r lora_rank lora_alpha lora_target_modules",
    "it is task.rewards, a list of {name, reward, weight}": "reward_funcs reward_weights multi_objective_aggregation",
    "the tokenizer of a reward model is that of reward_model.path": "reward_processing_classes",
    "it is learner.optimizer": "optimizers optim",
    "arguments of the optimizer are in learner.optimizer_params": "optim_args adam_epsilon",
    "it is task.env, an environment, or task.agent, a function that plays an episode":
        "environment_factory rollout_func",
    "it is rollout.max_turns": "max_tool_calling_iterations",
    "it is task.shuffle": "shuffle_dataset",
    "all columns reach the reward, in question.extra": "remove_unused_columns",
    "it is run.name": "run_name",
    "it is algorithm.minibatches, the parts of a batch": "steps_per_generation",
    "it is eval.samples": "num_generations_eval",
    "it is algorithm.epochs, passes over one batch": "num_iterations",
    "it is learner.grad_clip": "max_grad_norm",
    "it is learner.betas": "adam_beta1 adam_beta2",
    "it is learner.warmup_steps, a number of steps": "warmup_ratio num_warmup_steps",
    "it is rollout.max_response_tokens, for held-out prompts too": "max_tokens max_new_tokens",
    "replies are sampled by rollout.temperature, rollout.top_p and rollout.stop": "generation_kwargs",
    "it is rollout.stop, a list of texts": "stop_strings stop_token_ids",
    "there is none, so set it to False to compare": "use_bias_correction_kl",
    "it is algorithm.clip.low and algorithm.clip.high": "epsilon",
    "it is algorithm.clip.high": "epsilon_high",
    "it is algorithm.aggregation, and for cispo algorithm.loss": "loss_type",
    "it is algorithm.loss; sequence is gspo": "importance_sampling_level",
    "it is algorithm.advantage; group is grpo, none is dr_grpo": "scale_rewards",
    "there is none: the coefficient, algorithm.entropy_coef, is constant":
        "use_adaptive_entropy entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target",
    "there is none: all tokens of an answer are trained on": "top_entropy_quantile",
    "it is not built in: algorithm.loss may name a loss of yours as module:name":
        "sapo_temperature_neg sapo_temperature_pos vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg",
    "there is none: experts are balanced by nothing": "router_aux_loss_coef",
    "there is no dropout but that of adapters, model.lora.dropout": "disable_dropout",
    "the head computes in model.dtype, and logits are float32": "cast_lm_head_to_fp32",
    "there is none: an answer that is cut off has the reward that it gets": "mask_truncated_completions",
    "there is none: the reference stays as it is": "sync_ref_model ref_model_mixup_alpha ref_model_sync_steps",
    "it is rollout.engine: vllm": "use_vllm",
    "it is placement.colocated: true for colocate; a server that runs is rollout.server_url": "vllm_mode",
    "it is rollout.server_url": "vllm_server_base_url vllm_server_host vllm_server_port",
    "it is timeouts.startup_s": "vllm_server_timeout",
    "it is network.ports": "vllm_group_port port_range",
    "it is placement.colocated: servers let go of their memory in turns": "vllm_enable_sleep_mode",
    "weights are always gathered one by one; turns on one GPU are placement.colocated": "ds3_gather_for_generation",
    "flags of the server are in rollout.server_args":
        "vllm_model_impl vllm_max_model_length vllm_structured_outputs_regex cache_implementation "
        "use_transformers_continuous_batching transformers_continuous_batching_config use_transformers_paged",
    "it is rollout.mem_fraction": "vllm_gpu_memory_utilization gpu_memory_utilization",
    "it is placement.rollout.tp": "vllm_tensor_parallel_size",
    "it is algorithm.correction.kind": "vllm_importance_sampling_correction",
    "it is algorithm.correction.kind, and for masks algorithm.correction.masks.token or .sequence":
        "vllm_importance_sampling_mode",
    "it is algorithm.correction.cap": "vllm_importance_sampling_clip_max vllm_importance_sampling_cap",
    "it is algorithm.correction.floor": "vllm_importance_sampling_clip_min",
    "it is algorithm.correction.masks.opsm": "off_policy_mask_threshold",
    "it is model.dtype": "bf16 fp16",
    "it is learner.compile": "torch_compile",
    "there is nothing to set: answers are packed by tokens, learner.max_tokens_per_microbatch":
        "pad_to_multiple_of torch_empty_cache_steps",
    "it is eval.every_steps": "eval_steps eval_strategy",
    "it is checkpoint.every_steps": "save_steps save_strategy",
    "it is checkpoint.keep_last": "save_total_limit",
    "it is checkpoint.keep_best": "load_best_model_at_end",
    "it is checkpoint.best_by": "metric_for_best_model",
    "it is checkpoint.push_to_hub": "hub_model_id",
    f"every step is logged, and every answer is in the journal: {doc_page('run-directory.md')}":
        "logging_steps log_completions num_completions_to_print log_unique_prompts log_multimodal "
        "log_completions_hub_repo",
    "it is run.resume": "resume_from_checkpoint",
}  # fmt: skip

KEYS_OF_TRL = {name: said for said, names in _OF_SENTENCE.items() for name in names.split()}
"""[a name] the sentence for the error about it, without the full stop."""
