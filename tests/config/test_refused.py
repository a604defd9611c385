"""Settings that do not work together are refused at the key that is wrong."""

from __future__ import annotations

import re

import pytest

from async_rl.base.config import Config
from async_rl.base.config.check import SettingsError
from async_rl.base.config.loading import load_config
from async_rl.base.config.schema import leaf_schemas
from async_rl.base.seams import Advantage, EngineEntry, Loss, TransportEntry

BASE = ("model.path=m", "task.name=reasoning_gym/x")
SMALL_ENGINE = EngineEntry(
    open="no_module:engine", open_admin="no_module:admin", update_policies=("drain", "abort"), receives=("folder",),
    max_tensor_parallel=4,
)
PER_ANSWER_LOSS = Loss(function="no_module:loss", needs_row_advantage=True, aggregations=("constant",))
ADVANTAGE = Advantage(of_group_and_baseline="no_module:advantage")
BY_FOLDER = TransportEntry(open="no_module:publisher", delivers="folder", devices=("cpu",))
BY_MAGIC = TransportEntry(open="no_module:publisher", delivers="magic", devices=("cpu",))

TURNS = ("task.tools=[calculator]",)
EXACT = ("staleness.mode=exact", "weight_sync.on_update=drain")
BEST = ("checkpoint.keep_best=1", "checkpoint.every_steps=10", "eval.every_steps=5")
STAGED = ("weight_sync.double_buffer=device",)
SMALL = (f"rollout.engine={__name__}:SMALL_ENGINE", "weight_sync.on_update=drain")
LOSS = (f"algorithm.loss={__name__}:PER_ANSWER_LOSS",)
JUDGE = ("judge.path=j", "placement.judge.servers=2")
EVAL = ("eval.every_steps=5", "placement.eval.servers=1")
ADAPTER = ("weight_sync.lora=adapter", "model.lora.rank=4")
DELTA = ("weight_sync.delta=true", "model.dtype=bfloat16")
ENV = ("task={env: 'my:Env'}",)
LIMITED = ("algorithm.loss=tests.extensions.loss:POLICY_GRADIENT",)
SLOTS = "(staleness.{} + 1) * ceil(buffer.fresh_fraction * learner.prompts_per_step)"

REFUSED: dict[tuple[str, ...], list[tuple[str, ...]]] = {  # [settings that work together] (key at fault, further ones)
    (): [
        (SLOTS.format("max"), "weight_sync.every_steps=3", "staleness.max=1"),
        (SLOTS.format("max"), "staleness.max=1", "buffer.max_uses=4", "buffer.fresh_fraction=0.25"),
        (SLOTS.format("depth"), "staleness={max: 8, depth: 0.75}", "weight_sync.every_steps=2"),
        ("placement.learner.ranks", "placement.learner.ranks=256"),
        ("buffer.fresh_fraction", "buffer.max_uses=2"),
        ("buffer.fresh_fraction", "buffer.fresh_fraction=0.5", "staleness.max=3"),
        ("buffer.fresh_fraction", "buffer.fresh_fraction=0"),
        ("buffer.max_uses", "buffer.max_uses=0"),
        ("buffer.max_uses", "staleness.max=0", "buffer.max_uses=2", "buffer.fresh_fraction=0.96"),
        ("algorithm.num_minibatches", "algorithm.num_minibatches=65", "placement.learner.ranks=2"),
        ("algorithm.kl.target", "algorithm.kl.target=0.1"),
        ("learner.betas", "learner.optimizer=SGD", "learner.betas=[0.9,0.95]"),
        ("learner.sharding", "learner.sharding=hybrid"),
        ("eval.pin_version", "eval.pin_version=true"),
        ("sft.oracle", "sft.oracle=my_envs:oracle"),
        ("staleness.on_late", "staleness.on_late=mask", "weight_sync.on_update=drain"),
        ("placement.rollout.tp", "placement.rollout.tp=2", "rollout.engine=hf"),
        ("rollout.server_args", "rollout.server_args={disable_overlap_schedule: false, speculative_algorithm: EAGLE}"),
        ("algorithm.support", "rollout.engine=vllm", "rollout.top_p=0.9"),
        ("algorithm.support", *SMALL, "rollout.min_p=0.1"),
        ("weight_sync.on_update", "staleness.mode=exact"),
        ("staleness.depth", "staleness.depth=1.25"),
        ("staleness.depth", "staleness={max: 8, depth: 1, mode: exact}"),
        ("staleness.depth", "staleness={max: 8, depth: 0.5}", "buffer={max_uses: 2, fresh_fraction: 0.75}"),
        ("weight_sync.transport", "weight_sync.transport=cuda_ipc", "rollout.engine=hf"),
        ("weight_sync.transport", f"weight_sync.transport={__name__}:BY_MAGIC", "rollout.engine=hf"),
        ("reward_model.path", f"algorithm.advantage={__name__}:ADVANTAGE", "reward_model.path=x"),
        ("placement.judge.servers", "judge.path=j"),
        ("placement.judge.servers", "placement.judge.servers=1"),
        ("judge.urls", "judge.urls=[localhost:80]"),
        ("weight_sync.lora", "weight_sync.lora=adapter"),
        ("placement.rollout.engines", "placement.rollout.engines=[sglang, vllm]"),
        ("placement.rollout.engines[0]", "placement.rollout.engines=[slang]"),
        ("task.reward", *ENV, "task.reward=gsm8k"),
        ("task.rewards", *ENV, "task.rewards=[{}]"),
        ("task.sandbox.kind", "task.sandbox.kind=docker"),
        ("task.sandbox.url", "task.sandbox.url=host:8080"),
        ("algorithm.aggregation", "algorithm.advantage=opo", "algorithm.aggregation=sequence_mean"),
        ("algorithm.gamma", "algorithm.gamma=0.9"), ("reference.path", "reference.path=x"),
        ("algorithm.correction.floor", "algorithm.correction.floor=3.0"),
        ("algorithm.correction.masks.token", "algorithm.correction.masks.token=[2.0, 0.5]"),
        ("algorithm.old_logprobs", "algorithm.old_logprobs=interpolate"),
        ("reward_model.path", "algorithm.advantage=remax", "reward_model.path=x"),
        ("algorithm.correction.kind", "algorithm.old_logprobs=rollout", "algorithm.correction.kind=token_tis"),
        ("algorithm.correction.kind", "algorithm.advantage=vtrace", "algorithm.correction.kind=token_tis"),
        ("algorithm.old_logprobs", "algorithm.advantage=vtrace", "algorithm.old_logprobs=rollout"),
    ],
    ("algorithm.old_logprobs=interpolate", "algorithm.epochs=2"): [
        ("algorithm.correction.masks.m2po", "algorithm.correction.masks.m2po=0.04"),
        ("algorithm.old_logprobs", "algorithm.advantage=gae", "algorithm.whiten=true"),
        ("algorithm.old_logprobs", "algorithm.advantage=reinforce_pp", "algorithm.kl.kind=k1_reward"),
        ("algorithm.old_logprobs", "algorithm.whiten=true", "algorithm.kl.kind=k1_reward"),
    ],
    ("algorithm.preset=gspo",): [
        ("algorithm.loss", "algorithm.advantage=gae"), ("algorithm.aggregation", "algorithm.aggregation=token_mean"),
        ("algorithm.kl.kind", "algorithm.kl.kind=k1_reward"),
    ],
    ("staleness.max=8",): [("staleness.depth", f"staleness.depth={depth}") for depth in ("auto", 9, 1.3, "deep")],
    ("placement.learner.ranks=2", "learner.sequence_parallel=2"): [
        ("learner.sequence_parallel", "placement.learner.ranks=3"),
        ("learner.sequence_parallel", "learner.sequence_parallel=4", "placement.learner.nodes=2",
         "placement.learner.ranks=4", "placement.rollout.servers=2"),
        ("model.attn_implementation", "model.attn_implementation=eager"),
        ("placement.learner.ranks / learner.sequence_parallel = 2", "placement.learner.ranks=512"),
        ("learner.max_tokens_per_microbatch", "learner.max_tokens_per_microbatch=300"),
    ],
    TURNS: [
        ("rollout.max_episode_tokens", "rollout.max_episode_tokens=512"),
        ("learner.max_tokens_per_microbatch", "rollout.max_episode_tokens=20000"),
        ("staleness.on_late", "staleness.on_late=mask", "weight_sync.on_update=drain", "timeouts.batch_s=3600"),
        ("timeouts.batch_s", "weight_sync.on_update=drain", "timeouts.batch_s=60"),
    ],
    EXACT: [
        ("staleness.on_late", "staleness.on_late=drop"),
        ("weight_sync.every_steps", "weight_sync.every_steps=2", "staleness.max=2"),
        ("buffer.max_uses", "staleness.max=2", "buffer.max_uses=2", "buffer.fresh_fraction=0.5"),
    ],
    BEST: [
        ("eval.num_prompts", "eval.num_prompts=0"), ("task.eval_path", "task={path: x.jsonl}"),
        ("checkpoint.every_steps", "eval.every_steps=4"), ("checkpoint.every_steps", "eval.every_steps=0"),
        ("checkpoint.every_steps", "checkpoint.every_steps=5", "weight_sync.every_steps=2", "staleness.max=1"),
    ],
    STAGED: [
        ("weight_sync.double_buffer", "rollout.engine=hf", "weight_sync.double_buffer=host"),
        ("weight_sync.double_buffer", "placement.rollout={servers: 2, engines: [hf, sglang]}",
        "weight_sync.double_buffer=host"),
        *(("weight_sync.double_buffer", each) for each in (
            "weight_sync.on_update=drain", "rollout.server_urls=[http://there]", "placement.rollout.tp=2",
            "weight_sync.transport=disk", "weight_sync.transport=cuda_ipc",
        )),
        ("weight_sync.double_buffer", "placement.colocated=true", "staleness.max=0"),
    ],
    SMALL: [
        ("weight_sync.on_update", "weight_sync.on_update=in_place"),
        ("weight_sync.transport", "weight_sync.transport=gloo"),
        ("placement.rollout.tp", "placement.rollout.tp=8"),
        ("rollout.server_urls", "rollout.server_urls=[http://there]"),
    ],
    (*LOSS, "algorithm.aggregation=constant"): [
        ("algorithm.aggregation", "algorithm.aggregation=token_mean"),
        ("algorithm.kl.kind", "algorithm.kl.kind=k1_reward"),
        ("algorithm.loss", "algorithm.advantage=gae"),
    ],
    JUDGE: [
        ("judge.engine", "judge.engine=hf"), ("judge.api_key_variable", "judge.api_key_variable=K"),
        ("placement.judge.servers", "placement.colocated=true"),
    ],
    EVAL: [
        *(("placement.eval.servers", each) for each in (
            "placement.colocated=true", "rollout.server_urls=[http://h:1]", "eval.num_prompts=0", "eval.every_steps=0",
        )),
        ("task.eval_path", "task={path: x.jsonl}"), ("task.eval_path", 'task={path: x.jsonl, env: "my_envs:Env"}'),
    ],
    ADAPTER: [
        ("weight_sync.delta", *DELTA),
        *(("weight_sync.lora", each) for each in (
            "weight_sync.transport=cuda_ipc", "weight_sync.double_buffer=device",
            "rollout.server_args={quantization: fp8}", "rollout.engine=tests.extensions.engine:COUNTING",
        )),
    ],
    DELTA: [
        ("weight_sync.delta", "rollout.engine=vllm", "rollout.server_args={quantization: fp8}"),
        *(("weight_sync.delta", each) for each in (
            "model.dtype=float32", "weight_sync.transport=cuda_ipc", "weight_sync.double_buffer=host",
            "rollout.server_urls=[http://there]",
        )),
    ],
    ("placement.rollout={servers: 2, engines: [sglang, hf]}",): [
        ("weight_sync.transport", "weight_sync.transport=cuda_ipc"),
    ],
    ("task={path: x.jsonl}", "rollout.engine=hf"): [
        ("task.rewards[0].wieght", "task.rewards=[{reward: gsm8k, wieght: 1}]"),
        ("task.rewards[0].weight", "task.rewards=[{reward: gsm8k, weight: high}]"),
        ("task.rewards[0].name", "task.rewards=[{name: a b}]"),
        ("task.rewards[0].timeout_s", "task.rewards=[{timeout_s: -1}]"),
        ("task.reward", "task.rewards=[{reward: gsm8k}]", "task.reward=gsm8k"),
        *(("task.rewards", f"task.rewards={each}") for each in (
            "[{reward: gsm8k}, {reward: gsm8k}]", "[{name: mean}]", "[{weight: 0}]", "3",
        )),
    ],
    (*LIMITED, "rollout.engine=hf"): [
        ("algorithm.params.bound", "algorithm.params.bound=-1.0"),
        ("algorithm.params.bound", "algorithm.params.bound=far"),
        ("algorithm.clip.dual", "algorithm.clip.dual=0.5"),
        ("rollout.params.file", "rollout.params.file=a"),
        ("weight_sync.params.keep", "weight_sync.params.keep=1"),
    ],
    ("rollout.server_urls=[http://there]", "weight_sync.on_update=retract"): [
        ("rollout.server_urls[0]", f"rollout.server_urls=['{url}']") for url in (
            "there:30000", "ftp://there", "http://127.0.0.1:abc", "http://h:99999", "http://a:b@h", "http://h h:3",
            "http://h:3/?x=1", "http://h:3/#a",
        )
    ],
    ("placement.rollout.servers={min: 1, max: 4}",): [
        *(("placement.rollout.servers", f"placement.rollout.servers={servers}") for servers in (
            "{min: 5, max: 4}", "{min: 1}", "{max: 4}", "{}", "{min: 1, max: 2, mean: 1}", "0", "many",
        )),
        ("placement.rollout.leave_s", "placement.rollout.leave_s=0"),
        ("placement.rollout.engines", "placement.rollout.engines=[sglang, vllm, sglang, vllm]"),
        ("placement.rollout.servers", "placement.colocated=true", "placement.learner.ranks=4"),
        ("placement.rollout.servers", "rollout.engine=sglang", "weight_sync.transport=cuda_ipc"),
        ("placement.pin_cpus", "placement.pin_cpus=true"),
    ],
    ("rollout.group_size=1", "algorithm.advantage=remax"): [
        ("rollout.group_size", f"algorithm.advantage={advantage}")
        for advantage in ("grpo", "dr_grpo", "rloo", "maxrl", "opo", "reinforce_pp_baseline")
    ],
    ("task={env: 'my:Env'}", "algorithm.preset=gspo"): [("algorithm.advantage", "algorithm.advantage=reinforce_pp")],
}  # fmt: skip


ALLOWED = {key: {*map(str, leaf["enum"])} for key, leaf in leaf_schemas(Config).items() if "enum" in leaf}
"""[key] its values, where these are a few words."""


@pytest.mark.parametrize("together", REFUSED, ids=" ".join)
def test_settings_that_do_not_work_together_are_refused_at_the_key_that_is_wrong(together: tuple[str, ...]) -> None:
    load_config(None, [*BASE, *together])
    for key, *overrides in REFUSED[together]:
        with pytest.raises(SettingsError) as caught:
            load_config(None, [*BASE, *together, *overrides])
        (problem,) = caught.value.problems
        assert problem.key == key, overrides
        if choices := ALLOWED.get(key):  # no advice is a value that is itself refused
            advice = problem.text.removeprefix(f"{key} must be ").partition(", got ")[0].partition(" with ")[0]
            assert {*re.split(", | or ", advice.removeprefix("one of "))} <= choices, problem.text


@pytest.mark.parametrize(
    "overrides",
    [
        [*BEST, "task={path: x.jsonl, eval_path: y.jsonl}"],
        [*STAGED, "rollout.engine=hf"], [*STAGED, "weight_sync.double_buffer=host", "weight_sync.transport=gloo"],
        [*SMALL, "weight_sync.transport=disk", "placement.rollout.tp=4"],
        [f"algorithm.advantage={__name__}:ADVANTAGE", "rollout.group_size=1"],
        [f"weight_sync.transport={__name__}:BY_FOLDER"],
        ["rollout.group_size=1", "algorithm.advantage=reinforce_pp"],
        ["rollout.group_size=1", "algorithm.advantage=gae"],
        ["algorithm.advantage=opo", "algorithm.aggregation=constant"],
        ["algorithm.preset=gspo", "algorithm.advantage=reinforce_pp"],
        # the answer's reward is that of its last turn
        ["algorithm.preset=gspo", "algorithm.advantage=reinforce_pp", *TURNS],
        [*ENV, "algorithm.advantage=reinforce_pp"],
        *([f"rollout.server_urls=['{url}']"] for url in (
            "http://127.0.0.1:30000/", "https://there", "http://[::1]:3/below",
        )),
        ["placement.rollout.servers={min: 1, max: 4}", "rollout.server_urls=[http://there]"],
        ["placement.rollout={servers: {min: 1, max: 4}, nodes: 3}"], ["placement.rollout.servers={min: 2, max: 2}"],
        ["placement.rollout.servers={min: 1, max: 3}", "placement.learner={nodes: 2, ranks: 2}"],
        *([*EVAL, f"task={task}"] for task in (
            "{path: x.jsonl, eval_path: y.jsonl}", "{path: x.jsonl, eval_path: [y.jsonl, z.jsonl]}",
            '{env: "my_envs:Env"}', '{name: "my_tasks:Task"}',
        )),
        *(
            [*form, f"weight_sync.transport={transport}", f"rollout.engine={engine}"]
            for form in (ADAPTER, DELTA) for transport in ("auto", "nccl", "gloo", "disk")
            for engine in ("sglang", "vllm", "hf")
        ),
        *(
            [f"staleness.on_late={late}", f"weight_sync.on_update={on_update}", "staleness.max=2"]
            for late in ("wait", "drop", "mask") for on_update in ("in_place", "retract", "drain", "abort")
            if (late, on_update) != ("mask", "drain")
        ),
    ],
    ids=" ".join,
)  # fmt: skip
def test_settings_that_work_together_are_taken(overrides: list[str]) -> None:
    load_config(None, [*BASE, *overrides])


@pytest.mark.parametrize("servers", ["{min: 0, max: 2}", "{min: 1, max: many}"])
def test_a_minimum_or_maximum_that_is_no_number_above_0_is_refused_at_its_key(servers: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load_config(None, [*BASE, f"placement.rollout.servers={servers}"])
    assert [problem.key for problem in caught.value.problems] == ["placement.rollout.servers"]
