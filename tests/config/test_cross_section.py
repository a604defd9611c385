"""Settings that do not work together are refused at start, with the reason and the alternative."""

from __future__ import annotations

from pathlib import Path

import pytest

from async_rl.config import Config
from async_rl.config.loading import load_config
from async_rl.errors import ConfigError
from async_rl.seams import Advantage, EngineEntry, Loss, TransportEntry

FILE = "model: {path: models/x}\ntask: {name: reasoning_gym/spell_backward}\n"


def load(tmp_path: Path, *overrides: str) -> Config:
    (tmp_path / "config.yaml").write_text(FILE)
    return load_config(tmp_path / "config.yaml", overrides)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["weight_sync.every_steps=3", "staleness.max=1"],
            "at least weight_sync.every_steps * learner.prompts_per_step = 48, got 32. Otherwise the learner waits "
            "for ever. Set staleness.max >= 2 or weight_sync.every_steps <= 2.",
        ),
        (
            ["staleness.max=1", "buffer.max_uses=4", "buffer.fresh_fraction=0.25"],
            "= 16, got 8. Otherwise the learner waits for ever. Set staleness.max >= 3.",
        ),
        (
            ["placement.learner.ranks=256"],
            "placement.learner.ranks must be at most 128, the episodes of a step (learner.prompts_per_step * "
            "rollout.group_size), got 256 (command line). Each rank",
        ),
        (
            ["learner.sequence_parallel=2", "placement.learner.ranks=3"],
            "learner.sequence_parallel must be a divisor of 3, the learner ranks of a node (placement.learner), got 2",
        ),
        (
            ["learner.sequence_parallel=4", "placement={learner: {nodes: 2, ranks: 4}, rollout: {servers: 2}}"],
            "learner.sequence_parallel must be a divisor of 2, the learner ranks of a node (placement.learner), got 4",
        ),
        (
            ["learner.sequence_parallel=2", "placement.learner.ranks=2", "model.attn_implementation=eager"],
            "model.attn_implementation must be sdpa, flex_attention or flash_attention_2 with "
            "learner.sequence_parallel 2, got 'eager' (command line)",
        ),
        (
            ["learner.sequence_parallel=2", "placement.learner.ranks=512"],
            "placement.learner.ranks / learner.sequence_parallel = 2 must be at most 128, the episodes of a step",
        ),
        (
            ["learner.sequence_parallel=2", "placement.learner.ranks=2", "learner.max_tokens_per_microbatch=300"],
            "learner.max_tokens_per_microbatch must be at least task.max_prompt_tokens + rollout.max_response_tokens = "
            "768 / learner.sequence_parallel = 2, got 300 (command line)",
        ),
        (["algorithm.minibatches=65", "placement.learner.ranks=2"], "algorithm.minibatches must be at most 128 e"),
        (["buffer.max_uses=2"], "buffer.fresh_fraction must be below 1 with buffer.max_uses 2, got 1.0. No batch"),
        (["buffer.fresh_fraction=0.5", "staleness.max=3"], "buffer.fresh_fraction must be at least 1 / buffer.max_"),
        (["algorithm.kl.target=0.1"], "algorithm.kl.target must be 0 with algorithm.kl.kind none, got 0.1"),
        (["learner.optimizer=SGD", "learner.betas=[0.9,0.95]"], "learner.betas must be as by default with learner.opt"),
        (["buffer.fresh_fraction=0"], "buffer.fresh_fraction must be greater than 0, got 0 (command line)"),
        (["learner.sharding=hybrid"], "learner.sharding must be full with placement.learner.nodes 1, got 'hybrid' ("),
        (["eval.pin_version=true"], "eval.pin_version must be false with eval.every_steps 0, got True (command line)."),
        (
            ["task.tools=[calculator]", "rollout.max_episode_tokens=512"],
            "rollout.max_episode_tokens must be 0, or more than task.max_prompt_tokens = 512, the longest question, "
            "got 512 (command line). Raise it",
        ),
        (
            ["task.tools=[calculator]", "rollout.max_episode_tokens=20000"],
            "learner.max_tokens_per_microbatch must be at least rollout.max_episode_tokens = 20000, got",
        ),
        (["buffer.max_uses=0"], "buffer.max_uses must be greater than 0, got 0"),
        (["sft.oracle=my_envs:oracle"], "sft.oracle must be empty without task.env, task.agent and task.tools, got "),
        (
            ["buffer.max_uses=2", "buffer.fresh_fraction=0.96"],
            "buffer.max_uses must be 1 with staleness.max 0, got 2 (command line). A used group is at least one "
            "version old.",
        ),
        (
            ["staleness.late=mask", "weight_sync.on_update=drain"],
            "staleness.late must be wait or drop with weight_sync.on_update drain, got 'mask' (command line). All",
        ),
        (
            ["staleness.late=mask", "weight_sync.on_update=drain", "task.tools=[calculator]", "timeouts.work_s=3600"],
            "staleness.late must be wait or drop with weight_sync.on_update drain, got 'mask'",
        ),
        (
            ["task.tools=[calculator]", "weight_sync.on_update=drain", "timeouts.work_s=60"],
            "timeouts.work_s must be at least timeouts.episode_s = 3600 with weight_sync.on_update drain and episodes "
            "of several turns, got 60.0 (command line). A push waits until the episodes that run have ended.",
        ),
        (
            ["placement.rollout.tp=2", "rollout.engine=hf"],
            "placement.rollout.tp must be at most 1 with rollout.engine hf, got 2 (command line). It can't split",
        ),
        (
            ["rollout.server_args={disable_overlap_schedule: false, speculative_algorithm: EAGLE}"],
            "with true, for weight_sync.on_update in_place with speculative-algorithm, got "
            "{'disable_overlap_schedule': False, 'speculative_algorithm': 'EAGLE'} (command line). Else tokens are",
        ),
        (["staleness.mode=exact"], "weight_sync.on_update must be drain with staleness.mode exact, got 'in_place'."),
        (["staleness.mode=exact", "staleness.late=drop"], "staleness.late must be wait with staleness.mode exact"),
        (
            ["staleness.mode=exact", "weight_sync.on_update=drain", "weight_sync.every_steps=2", "staleness.max=2"],
            "weight_sync.every_steps must be 1 with staleness.mode exact, got 2 (command line). Every version trains a",
        ),
        (
            ["staleness.mode=exact", "weight_sync.on_update=drain", "staleness.max=2", "buffer.max_uses=2",
             "buffer.fresh_fraction=0.5"],
            "buffer.max_uses must be 1 with staleness.mode exact, got 2 (command line). A group used again is",
        ),
        (
            ["weight_sync.transport=cuda_ipc", "rollout.engine=hf"],
            "weight_sync.transport must be auto, nccl, gloo or disk with rollout.engine hf, got 'cuda_ipc' "
            "(command line). Or set rollout.engine: sglang or vllm.",
        ),
        *(
            (
                ["weight_sync.transport=cuda_ipc", elsewhere],
                "weight_sync.transport must be auto, nccl, gloo or disk but for servers of one GPU each on one host",
            )
            for elsewhere in (
                "placement.rollout.nodes=1", "placement.rollout.tp=2", "network={host: 10.0.0.1, insecure: true}",
            )
        ),
    ],
)
def test_settings_that_do_not_work_together_are_refused_with_the_alternative(
    tmp_path: Path, overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, *overrides)
    assert message in str(caught.value)


BEST = ("checkpoint.keep_best=1", "checkpoint.every_steps=10", "eval.every_steps=5")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["eval.size=0"], "eval.size must be above 0 with checkpoint.keep_best, got 0 (command line). It chooses"),
        (["task={path: x.jsonl}"], "task.eval_path must be the held-out file with checkpoint.keep_best and task.path"),
    ],
)
def test_a_best_checkpoint_by_an_evaluation_that_never_comes_is_refused(
    tmp_path: Path, overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, *BEST, *overrides)
    assert message in str(caught.value)


@pytest.mark.parametrize("overrides", [[], ["task={path: x.jsonl, eval_path: y.jsonl}"]])
def test_the_best_checkpoint_is_kept_where_each_is_evaluated(tmp_path: Path, overrides: list[str]) -> None:
    assert load(tmp_path, *BEST, *overrides).checkpoint.keep_best == 1


@pytest.mark.parametrize("late", ["wait", "drop", "mask"])
@pytest.mark.parametrize("on_update", ["in_place", "retract", "drain", "abort"])
def test_every_other_pair_of_late_and_update_policy_is_allowed(tmp_path: Path, late: str, on_update: str) -> None:
    if (late, on_update) != ("mask", "drain"):
        config = load(tmp_path, f"staleness.late={late}", f"weight_sync.on_update={on_update}", "staleness.max=2")
        assert (config.staleness.late, config.weight_sync.on_update) == (late, on_update)


def test_slots_follow_from_the_fresh_share_of_a_batch(tmp_path: Path) -> None:
    config = load(tmp_path, "staleness.max=2", "buffer.max_uses=3", "buffer.fresh_fraction=0.35")
    assert (config.fresh_per_step, config.slots) == (6, 18)  # ceil(0.35 * 16) of 16
    assert load(tmp_path, "staleness.max=8", "staleness.depth=1.25").slots == 36
    at_pushes = load(tmp_path, "staleness.max=8", "staleness.depth=2", "weight_sync.every_steps=3")
    assert (at_pushes.slots, at_pushes.slot_limits.fewest) == (48, 48)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["staleness.depth=1.25"], "staleness.depth must be max, or 0..0, which is staleness.max"),
        (["staleness.max=8", "staleness.depth=auto"], "staleness.depth"),
        (["staleness.max=8", "staleness.depth=9"], "staleness.depth must be max, or 0..8"),
        (["staleness.max=8", "staleness.depth=1.3"], "staleness.depth"),
        (["staleness.max=8", "staleness.depth=deep"], "staleness.depth"),
        (["staleness={max: 8, depth: 1, mode: exact}"], "staleness.depth must be max with staleness.mode: exact"),
        (
            ["staleness={max: 8, depth: 0.75}", "weight_sync.every_steps=2"],
            "(staleness.depth + 1) * ceil(buffer.fresh_fraction * learner.prompts_per_step) must be at least "
            "weight_sync.every_steps * learner.prompts_per_step = 32, got 28",
        ),
        (
            ["staleness={max: 8, depth: 0.5}", "buffer={max_uses: 2, fresh_fraction: 0.75}"],
            "staleness.depth must be 1 or more with buffer.max_uses 2, got 0.5",
        ),
    ],
)
def test_depths_that_the_bound_does_not_allow_are_refused(tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, *overrides)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "kept"),
    [
        (["checkpoint.every_steps=0"], 100), (["checkpoint.every_steps=200"], 400),
        (["checkpoint.every_steps=50", "buffer.journal_keep_steps=0"], 100),
        (["checkpoint.every_steps=50", "buffer.journal_keep_steps=300"], 300), (["buffer.journal_keep_steps=-1"], -1),
    ],
)
def test_the_journal_keeps_tokens_until_the_checkpoint_after_next_whatever_is_set(
    tmp_path: Path, overrides: list[str], kept: int
) -> None:
    assert load(tmp_path, *overrides).journal_kept_steps == kept


def test_only_group_normalised_advantages_drop_groups_of_equal_rewards(tmp_path: Path) -> None:
    assert load(tmp_path).drops_zero_variance
    assert not load(tmp_path, "algorithm.filter_zero_variance=false").drops_zero_variance
    assert not load(tmp_path, "algorithm.advantage=gae").drops_zero_variance


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout.engine=hf", "weight_sync.staging=host"], "must be none, device with rollout.engine hf, got 'host'"),
        (["weight_sync.on_update=drain"], "must be none with weight_sync.on_update drain, got 'device'"),
        (["placement.colocated=true"], "must be none with placement.colocated and staleness.max 0, got 'device'"),
        (["rollout.server_url=http://there"], "must be none with rollout.server_url, got 'device'"),
        (["placement.rollout.tp=2"], "must be none with placement.rollout.tp above 1, got 'device'"),
        (["weight_sync.transport=disk"], "must be none with weight_sync.transport disk, got 'device'"),
        (["weight_sync.transport=cuda_ipc"], "loaded within the pause. Others: nccl or gloo."),
        (
            ["placement.rollout={servers: 2, engines: [hf, sglang]}", "weight_sync.staging=host"],
            "must be none, device with rollout.engine hf, got 'host'",
        ),
    ],
)
def test_weights_are_staged_only_where_that_saves_a_pause(tmp_path: Path, overrides: list[str], message: str) -> None:
    for fits in (["rollout.engine=hf"], ["weight_sync.staging=host", "weight_sync.transport=gloo"]):
        load(tmp_path, "weight_sync.staging=device", *fits)
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, "weight_sync.staging=device", *overrides)
    assert message in str(caught.value)


SMALL_ENGINE = EngineEntry(
    open="no_module:engine", open_admin="no_module:admin", update_policies=("drain", "abort"), receives=("folder",),
    max_tensor_parallel=4,
)
PER_ANSWER_LOSS = Loss(function="no_module:loss", needs_row_advantage=True, aggregations=("constant",))
ADVANTAGE = Advantage(of_group_and_baseline="no_module:advantage")
BY_FOLDER = TransportEntry(open="no_module:publisher", delivers="folder", devices=("cpu",))
BY_MAGIC = TransportEntry(open="no_module:publisher", delivers="magic", devices=("cpu",))
HERE = "tests.config.test_cross_section"
SMALL = (f"rollout.engine={HERE}:SMALL_ENGINE", "weight_sync.on_update=drain")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["weight_sync.on_update=in_place"], f"must be drain or abort with rollout.engine {HERE}:SMALL_ENGINE, got"),
        (["weight_sync.on_update=in_place"], "got 'in_place' (command line). Or set rollout.engine: sglang, vllm or"),
        (["weight_sync.transport=gloo"], f"must be auto or disk with rollout.engine {HERE}:SMALL_ENGINE, got 'gloo'"),
        (["placement.rollout.tp=8"], "placement.rollout.tp must be at most 4 with rollout.engine"),
        (["rollout.server_url=http://there"], "It can't take over a server. Or set rollout.engine: sglang."),
    ],
)
def test_an_engine_is_not_asked_for_what_it_does_not_declare(
    tmp_path: Path, overrides: list[str], message: str
) -> None:
    allowed = load(tmp_path, *SMALL, "weight_sync.transport=disk", "placement.rollout.tp=4")
    assert allowed.rollout.engine_entry is SMALL_ENGINE
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, *SMALL, *overrides)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], "algorithm.aggregation must be constant with algorithm.loss tests.config.test_cross_section:PER_ANSWER"),
        (["algorithm.aggregation=constant", "algorithm.kl.kind=k1_reward"], "algorithm.kl.kind must be none, k2_loss"),
        (["algorithm.advantage=gae"], "algorithm.loss must be one of ppo_clip, cispo, dppo_tv with algorithm."),
    ],
)
def test_a_loss_from_outside_is_checked_by_what_it_declares(tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, f"algorithm.loss={HERE}:PER_ANSWER_LOSS", *overrides)
    assert message in str(caught.value)


def test_an_advantage_from_outside_is_checked_by_what_it_declares(tmp_path: Path) -> None:
    outside = f"algorithm.advantage={HERE}:ADVANTAGE"
    config = load(tmp_path, outside, "rollout.group_size=1")
    assert config.algorithm.advantage_entry is ADVANTAGE and not config.drops_zero_variance
    with pytest.raises(ConfigError, match=r"reward_model\.path must be empty with algorithm\.advantage tests\.config"):
        load(tmp_path, outside, "reward_model.path=x")


def test_a_transport_from_outside_must_deliver_what_the_engine_receives(tmp_path: Path) -> None:
    config = load(tmp_path, f"weight_sync.transport={HERE}:BY_FOLDER")
    assert config.weight_sync.transport_entry is BY_FOLDER
    with pytest.raises(ConfigError, match=r"transport must be auto, nccl, gloo or disk with rollout.engine hf"):
        load(tmp_path, f"weight_sync.transport={HERE}:BY_MAGIC", "rollout.engine=hf")


@pytest.mark.parametrize(("limit", "longest"), [(0, 528), (1000, 1000), (512, 512), (100, 100)])
def test_an_episode_is_as_long_as_its_limit_says(
    tmp_path: Path, limit: int, longest: int
) -> None:
    config = load(
        tmp_path, "task.name=", "task.env=my_games:Game", "rollout.max_response_tokens=16",
        f"rollout.max_episode_tokens={limit}",
    )
    assert config.longest_tokens == config.longest_response_tokens == longest


def test_a_third_may_be_written_with_six_digits(tmp_path: Path) -> None:
    loaded = load(tmp_path, "buffer.max_uses=3", "buffer.fresh_fraction=0.333333", "staleness.max=3")
    assert loaded.fresh_per_step == 6  # of 16
