"""The JSON schema of the configuration, and the conversion of pydantic's errors to SettingsErrors with hints."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from functools import cache
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import ErrorDetails

from async_rl.base.config.check import Problem, SettingsError
from async_rl.base.errors import ConfigError

_ALLOWED = {
    "bool_type": "true or false",
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "text (in quotes if it looks like a number)",
    "tuple_type": "a list, e.g. [a, b]",
    "dict_type": "a section of names and values",
}
"""For each pydantic error that names a Python type: the allowed values in YAML's words."""


class _Generator(GenerateJsonSchema):
    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def encode_default(self, default: Any) -> Any:
        return default


@cache
def json_schema(kind: type) -> dict[str, Any]:
    """Return the JSON schema of Config or of a section's class. The dict is cached: callers must not change it."""
    text = json.dumps(TypeAdapter(kind).json_schema(schema_generator=_Generator))
    text = text.replace("Infinity", '".inf"').replace("\\n", " ")  # JSON has no infinity; descriptions are one line
    return {"$schema": GenerateJsonSchema.schema_dialect, **json.loads(text)}


def explain(error: ValidationError, kind: type, prefix: str) -> SettingsError:
    """Convert a pydantic error to a SettingsError that lists all refused settings.

    Args:
        kind: the class of the section.
        prefix: the section's key, such as `algorithm.clip`.
    """
    problems: list[Problem] = []
    for each in error.errors():
        for problem in _problems(each, kind, prefix):
            both = _either(problems[-1], problem) if problems else None
            problems[-1:] = [both] if both else [*problems[-1:], problem]
    return SettingsError(problems)


def _either(first: Problem, second: Problem) -> Problem | None:
    """Merge two problems that are about one value with several allowed forms; None if they are different problems."""
    begin, got = f"{first.key} must be ", ", got "
    if not all(each.key == first.key and each.text.startswith(begin) for each in (first, second)):
        return None
    (allowed, _, value), other = first.text.rpartition(got), second.text.rpartition(got)[0].removeprefix(begin)
    return Problem(first.key, f"{allowed} or {other}{got}{value}", first.rest or second.rest)


def takes_text(kind: type, key: str) -> bool:
    """Whether the values of `key`, such as `task.reward`, are text.

    Args:
        kind: the class of the section that has the key.
    """
    return _find(kind, key.split(".")).get("type") == "string"


def describe(value: Any) -> str:
    """Return a value with its type, such as `3 (int)`, for error messages; "nothing" for None."""
    return "nothing" if value is None else f"{value!r} ({type(value).__name__})"


def _problems(error: ErrorDetails, kind: type, prefix: str) -> Sequence[Problem]:
    path, value, context = list(error["loc"]), error["input"], error.get("ctx", {})
    cause, sort = context.get("error"), error["type"]
    if isinstance(cause, SettingsError):
        return cause.problems
    if sort in ("unexpected_keyword_argument", "invalid_key"):
        return [_unknown_key(path, value, kind, prefix)]
    if path[-1:] == ["[key]"]:  # a dict of free names has a name that is not text
        path, sort = path[:-2], "dict_type"
    elif sort in ("missing", "too_long") and isinstance(value, (list, tuple)):
        path, sort = [name for name in path if isinstance(name, str)], "length"
    elif path and "anyOf" in _find(kind, path[:-1]):  # the last part names one of the forms that are allowed
        path = path[:-1]
    key, schema = _dotted(path, prefix), _find(kind, path)
    if sort == "missing":
        remedy = f"Add it to the config file or as the override {key}=..."
        return [Problem(key, f"{key} is required and was not given. {remedy}")]
    if isinstance(cause, ConfigError):
        return [Problem(key, str(cause))]
    if sort == "length":
        allowed = f"a list of {schema['minItems']} values, e.g. {schema['default']}"
    elif "properties" in schema:
        allowed = f"a section with some of {', '.join(schema['properties'])}"
    elif "enum" in schema:
        allowed = f"one of {', '.join(schema['enum'])}"
    else:
        allowed = _ALLOWED.get(sort) or str(cause or error["msg"].removeprefix("Input should be "))
    is_type = sort.endswith("_type") or sort == "length"
    text = f"{key} must be {allowed}, got {describe(value) if is_type else repr(value)}"
    return [Problem(key, text, "" if is_type else _hint(value, sort, schema, kind, prefix))]


def _hint(value: Any, sort: str, schema: dict[str, Any], kind: type, prefix: str) -> str:
    if "enum" in schema:
        near = get_close_matches(str(value), schema["enum"], n=1, cutoff=0.5)
        return f". Did you mean {near[0]}?" if near else ""
    if sort == "finite_number":
        may = [_dotted([name], prefix) for name, leaf in leaf_schemas(kind).items() if "mayBeInfinite" in str(leaf)]
        return f". Only {', '.join(may)} may be .inf: give a number." if may else ". Give a number."
    return f". {schema['description']}" if "description" in schema else ""


def _unknown_key(path: Sequence[str | int], value: Any, kind: type, prefix: str) -> Problem:
    """Return the problem of an unknown key. It names our key for another framework's name, else the most similar key.
    """
    name, section = str(path[-1]), _dotted(path[:-1], prefix)
    names = list(_find(kind, path[:-1])["properties"])
    leaves: dict[str, list[str]] = {}
    for leaf in leaf_schemas(kind):
        leaves.setdefault(leaf.rpartition(".")[2], []).append(_dotted([leaf], prefix))
    key = _dotted([name], section)
    if elsewhere := OTHER_NAMES.get(key) or OTHER_NAMES.get(name):
        hint = elsewhere
    elif near := get_close_matches(name, names, n=1, cutoff=0.7):
        hint = f"did you mean {_dotted(near, section)}?"
    elif below := [
        _dotted([leaf], prefix) for leaf in leaf_schemas(kind) for each in _leaves_in(name, value)
        if f".{leaf}".endswith(f".{each}")
    ]:
        hint = f"did you mean {' or '.join(below)}?"
    elif below := [each for each in _names_in(value) if each in OTHER_NAMES]:
        hint = ", ".join(f"{each}: {OTHER_NAMES[each]}" for each in below)
    elif near := get_close_matches(name, leaves, n=1, cutoff=0.85):
        hint = f"did you mean {' or '.join(leaves[near[0]])}?"
    else:
        hint = f"allowed {'in ' + section if section else 'at the top'}: {', '.join(names)}"
    return Problem(key, f"unknown key {key}", f"; {hint}")


def _leaves_in(name: str, value: Any) -> list[str]:
    """Return the dotted keys at and below `name`, such as kl.coef, that have a value."""
    if not isinstance(value, dict) or not value:
        return [name]
    return [leaf for below, each in value.items() for leaf in _leaves_in(f"{name}.{below}", each)]


def _names_in(value: Any) -> list[str]:
    """Return all keys in nested mappings."""
    return [n for name, each in value.items() for n in (name, *_names_in(each))] if isinstance(value, dict) else []


def _dotted(path: Iterable[str | int], prefix: str) -> str:
    """Return `prefix` and the path below it as one key: learner and `["betas", 1]` are learner.betas[1]."""
    for name in path:
        prefix += f"[{name}]" if isinstance(name, int) else f".{name}" if prefix else name
    return prefix


def _find(kind: type, path: Iterable[str | int]) -> dict[str, Any]:
    """Return the JSON schema of the key at `path` in the class `kind`; {} for an item of a dict with free names."""
    node = json_schema(kind)
    for name in path:
        node = node.get("items", {}) if isinstance(name, int) else node.get("properties", {}).get(name, {})
        if "$ref" in node:
            node = json_schema(kind)["$defs"][node["$ref"].rpartition("/")[2]]
    return node


def leaf_schemas(kind: type, path: tuple[str, ...] = ()) -> dict[str, dict[str, Any]]:
    """Return {dotted key: JSON schema} of all keys at or below `path` that have a value, not a section."""
    node = _find(kind, path)
    if "properties" not in node:
        return {".".join(path): node}
    return {key: leaf for name in node["properties"] for key, leaf in leaf_schemas(kind, (*path, name)).items()}


_HERE = {
    "it is staleness.max, in policy versions": "max_staleness max_off_policy_steps max_async_level async_level "
    "max_head_offpolicyness staleness_threshold max_off_policy_threshold max_trajectory_age_steps max_staleness_steps "
    "max_steps_off_policy max_lag off_by_n async_steps",
    "it is staleness.on_late: wait, drop or mask": "staleness.late max_off_policy_strategy",
    "it is staleness.mode: exact": "strict_async_level",
    "it is staleness.depth, in batches": "sampling_steps_ahead async_queue_size max_inflight_tasks",
    "it is weight_sync.every_steps":
        "weight_sync_steps trigger_parameter_sync_step parameter_sync_step update_weights_interval",
    "it is weight_sync.on_update": "partial_rollout in_flight_weight_updates inflight_updates",
    "it is rollout.group_size, and eval.samples_per_prompt for held-out prompts":
        "n num_generations n_samples_per_prompt rollouts_per_example num_generations_per_prompt",
    "it is rollout.max_response_tokens": "max_completion_length max_response_length max_new_tokens max_tokens",
    "it is task.max_prompt_tokens": "max_prompt_length",
    "it is rollout.gpu_memory_utilization": "mem_fraction mem_fraction_static vllm_gpu_memory_utilization",
    "it is placement.rollout.tp": "tensor_model_parallel_size tensor_parallel_size vllm_tensor_parallel_size tp_size",
    "it is rollout.engine: vllm": "use_vllm",
    "it is learner.prompts_per_step, in prompts": "train_batch_size batch_size rollout_batch_size num_prompts_per_step "
    "per_device_train_batch_size gradient_accumulation_steps generation_batch_size",
    "it is algorithm.num_minibatches, a count": "minibatches ppo_mini_batch_size num_mini_batches steps_per_generation",
    "it is learner.max_tokens_per_microbatch, in tokens":
        "micro_batch_size ppo_micro_batch_size_per_gpu ppo_max_token_len_per_gpu",
    "it is learner.lr": "learning_rate",
    "the schedule is learner.warmup_steps, learner.lr_decay_fraction and learner.lr_decay":
        "decay decay_fraction decay_to lr_scheduler_type lr_scheduler warmup_ratio lr_warmup_steps min_lr",
    "it is learner.grad_clip": "max_grad_norm",
    "it is algorithm.epochs": "ppo_epochs num_iterations",
    "it is algorithm.clip.low and .high": "epsilon epsilon_high clip_ratio clip_ratio_low clip_ratio_high eps_clip",
    "it is algorithm.clip.dual": "delta clip_ratio_c algorithm.params.dual dual",
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
    "it is rollout.max_groups_in_flight": "rollout.concurrency",
    "it is rollout.server_urls, a list": "rollout.server_url",
    "it is algorithm.old_logprobs: recompute, rollout or interpolate": "proximal",
    "it is algorithm.gae_lambda": "lam lambda",
    "it is eval.num_prompts": "eval.size",
    "it is eval.samples_per_prompt": "eval.samples",
    "it is eval.correct_threshold": "right_above",
    "it is timeouts.batch_s": "work_s",
    "it is timeouts.buffer_s": "wire_s",
    "it is weight_sync.double_buffer": "staging",
    "it is weight_sync.verify_every: 0 for false, 50 by default": "weight_sync.verify",
    "there is none: logprobs would not be those of the sampled distribution": "repetition_penalty",
}  # fmt: skip
OTHER_NAMES = {name: said for said, names in _HERE.items() for name in names.split()}
"""For other frameworks' names, whole keys or the last parts of keys: what the error says about them."""
