"""Rewards compared with those of transformers for one sequence at a time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from async_rl.base.config import LearnerConfig, RewardModelConfig, TaskConfig
from async_rl.base.errors import AsyncRLError, ConfigError
from async_rl.base.types import Batch, Group
from learner.loop.ranks import Ranks
from learner.loop.updater import Updater
from learner.models.reward_model import RewardModel, RewardRows
from learner.models.tiny_model import character_tokenizer
from rollout_server.tasks.base import prompt_text, prompt_tokens
from tests.kit.configs import learner_config
from tests.kit.groups import batch_of, make_group, make_row
from tests.kit.learner.batches import make_batch, make_episodes, make_turns_row
from tests.kit.models import VOCAB, save_bare_reward_model, save_tiny_model
from tests.kit.tokenizers import tokenizer_of

pytestmark = pytest.mark.processes  # together they compute for long

CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_labels": 1,
    "initializer_range": 0.5,
}  # fmt: skip


def open_reward_model(policy: Path, reward: Path, max_tokens: int = 4096, **sections: Any) -> RewardModel:
    config = learner_config(
        policy, **sections,
        reward_model=RewardModelConfig(path=str(reward)),
        learner=LearnerConfig(prompts_per_step=3, max_tokens_per_microbatch=max_tokens),
    )
    return RewardModel(config, CPU, torch.float32, Ranks(init_device_mesh("cpu", (1,))))


def rewards_of(batch: Batch) -> list[float]:
    return [row.reward for group in batch.groups for row in group.rows]


@pytest.mark.parametrize("max_tokens", [4096, 30])
def test_rewards_are_those_of_transformers_and_only_they_change(
    tiny_model_path: Path, tmp_path: Path, one_rank: None, max_tokens: int
) -> None:
    reward_model = open_reward_model(tiny_model_path, save_bare_reward_model(tmp_path / "rm"), max_tokens)
    batch = make_batch()
    batch.groups[0].rows[0].tokens[-1] = 2  # the id of the padding, which transformers would step over
    scored = reward_model.score(batch)
    lm = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm", dtype=torch.float32)
    lm.config.pad_token_id = None  # then it reads the last token of a single sequence
    expected = [
        lm(torch.tensor([[*group.prompt_tokens.tolist(), *row.tokens.tolist()]])).logits.item()
        for group in batch.groups
        for row in group.rows
    ]
    assert rewards_of(scored) == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert len({round(x, 4) for x in expected}) > 6
    for group, before in zip(scored.groups, batch.groups, strict=True):
        assert (group.group_id, group.prompt_tokens is before.prompt_tokens) == (before.group_id, True)
        assert [r.tokens is s.tokens for r, s in zip(group.rows, before.rows, strict=True)] == [True] * 4


SHOWS_ROLES = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }};{% endfor %}"
REFUSES_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
) + SHOWS_ROLES
LEAVES_SYSTEM_OUT = (
    "{% for m in messages %}{% if m['role'] != 'system' %}[{{ m['role'] }}] {{ m['content'] }};{% endif %}{% endfor %}"
)


def said(*texts: str) -> list[dict[str, str]]:
    """Messages; a text is the user's unless it begins with another role."""
    parts = [text.rpartition(": ") for text in texts]
    return [{"role": role or "user", "content": content} for role, _, content in parts]


CONVERSATIONS = [
    said("2 + 3?"), said("<think> twice\nin <b>two</b> lines"), said("system: Be brief.", "2 + 3?"),
    said("hi", "assistant: yes?", "2 + 3?"), said("system: A", "b", "assistant: c", "d", "assistant: e", "f"),
    said("two in a row", "2 + 3?"),
]  # fmt: skip


def group_of(policy: Any, number: int, messages: list[dict[str, str]], *answers: str) -> Group:
    """The group of a prompt in the policy's chat template."""
    prompt = prompt_tokens(policy, prompt_text(policy, messages, "a test"))
    ends = [[*policy.encode(text, add_special_tokens=False), policy.eos_token_id] for text in answers]
    rows = [make_row(answer, [-1.0] * len(answer), 0.0) for answer in ends]
    return make_group(number, prompt, rows, messages=tuple(messages))


def save_other_reward_model(folder: Path, template: str | None) -> PreTrainedTokenizerBase:
    """Save a reward model with a vocabulary of its own; returns its tokenizer."""
    tokenizer = character_tokenizer()
    tokenizer.add_tokens(["2 + 3"])  # so that the question has fewer tokens
    tokenizer.chat_template = template
    save_bare_reward_model(folder, vocab=len(tokenizer), pad_token_id=0)
    tokenizer.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("family", ["qwen3", "llama3_2"])
def test_a_reward_model_with_another_vocabulary_reads_messages_in_its_own_template(
    tmp_path: Path, one_rank: None, family: str
) -> None:
    policy = tokenizer_of(family)
    policy.save_pretrained(tmp_path / "policy")
    own = save_other_reward_model(tmp_path / "rm", SHOWS_ROLES)
    groups = [group_of(policy, i, messages, "5", "no idea") for i, messages in enumerate(CONVERSATIONS)]
    scored = open_reward_model(tmp_path / "policy", tmp_path / "rm").score(batch_of(*groups))
    lm = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm", dtype=torch.float32)
    expected = []
    for messages in CONVERSATIONS:
        for answer in ("5", "no idea"):
            whole = [*messages, {"role": "assistant", "content": answer}]
            read = own.apply_chat_template(whole, return_dict=False, return_tensors="pt")
            expected.append(lm(read).logits.item())
    assert rewards_of(scored) == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert len({round(x, 3) for x in expected}) == len(expected)


@pytest.mark.parametrize(("template", "expected"), [
    (REFUSES_SYSTEM, "[user] Be brief.\n\n2 + 3?;[assistant] it is 5;"),
    (LEAVES_SYSTEM_OUT, "[user] Be brief.\n\n2 + 3?;[assistant] it is 5;"),
    (None, "Be brief.\n2 + 3?it is 5"),
])  # fmt: skip
def test_a_system_message_comes_before_the_question_where_the_template_takes_none(
    tmp_path: Path, template: str | None, expected: str
) -> None:
    policy = tokenizer_of("qwen2_5")
    policy.save_pretrained(tmp_path / "policy")
    own = save_other_reward_model(tmp_path / "rm", template)
    rows = RewardRows(str(tmp_path / "policy"), str(tmp_path / "rm"))
    answer = policy.encode("it is 5<|im_end|>", add_special_tokens=False)
    assert own.decode(rows.row(said("system: Be brief.", "2 + 3?"), [1], answer).tokens) == expected
    alone = own.decode(rows.row(said("system: Be brief."), [1], answer).tokens)
    assert alone == expected.replace("\n\n2 + 3?", "").replace("\n2 + 3?", "")


@pytest.mark.parametrize("kinds", [2, 1])
def test_an_encoder_with_segments_gets_those_of_a_pair_of_texts(
    tmp_path: Path, one_rank: None, kinds: int
) -> None:
    save_tiny_model("tiny-qwen2", tmp_path / "policy", 0)
    characters = character_tokenizer()
    characters.add_tokens(["2 + 3"])
    own = PreTrainedTokenizerFast(
        tokenizer_object=characters.backend_tokenizer, pad_token="<pad>",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )  # fmt: skip
    torch.manual_seed(4)
    shape = SHAPE | {"vocab_size": len(own), "type_vocab_size": kinds, "pad_token_id": 0}
    BertForSequenceClassification(BertConfig(**shape)).save_pretrained(tmp_path / "rm")
    own.save_pretrained(tmp_path / "rm")
    group = group_of(AutoTokenizer.from_pretrained(tmp_path / "policy"), 0, said("2 + 3 ="), "5", "no idea")
    scored = open_reward_model(tmp_path / "policy", tmp_path / "rm").score(batch_of(group))
    lm = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm", dtype=torch.float32)
    pairs = [own("2 + 3 =", answer, return_tensors="pt") for answer in ("5", "no idea")]
    assert [pair.token_type_ids.tolist() for pair in pairs] == [[[0] * 3 + [1]], [[0] * 3 + [1] * 7]]
    alone = [lm(pair.input_ids).logits.item() for pair in pairs]
    expected = [lm(**pair).logits.item() for pair in pairs] if kinds > 1 else alone
    assert rewards_of(scored) == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert (expected != pytest.approx(alone, abs=1e-3)) == (kinds > 1)


def test_an_answer_with_tools_is_rewarded_at_its_last_turn(
    tiny_model_path: Path, tmp_path: Path, one_rank: None
) -> None:
    rows = [make_turns_row(".rR.R", [0.5, 0.25], 0.75), make_turns_row("rR", [1.0], 1.0)]
    group = replace(make_group(0, [3, 4], rows), episodes=make_episodes([1, 1]))
    reward_model = open_reward_model(tiny_model_path, save_bare_reward_model(tmp_path / "rm"))
    scored = reward_model.score(batch_of(group))
    first, second = scored.groups[0].rows
    lm = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm", dtype=torch.float32)
    assert first.reward == pytest.approx(lm(torch.tensor([[3, 4, 3, 4, 5, 6, 7]])).logits.item(), rel=1e-5)
    assert (first.turn_rewards, second.turn_rewards) == ((0.0, first.reward), (second.reward,))


def test_with_a_weight_the_tasks_rewards_are_added_turn_by_turn(
    tiny_model_path: Path, tmp_path: Path, one_rank: None
) -> None:
    short = replace(make_turns_row("rR", [1.0], 1.0), rewards={"short": 1.0})
    rows = [make_turns_row(".rR.R", [0.5, 0.25], 0.75), short]
    batch = batch_of(replace(make_group(0, [3, 4], rows), episodes=make_episodes([1, 1])))
    path = str(save_bare_reward_model(tmp_path / "rm"))
    plain = open_reward_model(tiny_model_path, tmp_path / "rm").score(batch).groups[0].rows
    mixed = RewardModelConfig(path=path, task_weight=-2.0)
    config = learner_config(tiny_model_path, learner={"prompts_per_step": 1}, reward_model=mixed)
    model = RewardModel(config, CPU, torch.float32, Ranks(init_device_mesh("cpu", (1,))))
    first, second = model.score(batch).groups[0].rows
    assert first.turn_rewards == pytest.approx((-1.0, plain[0].reward - 0.5))
    assert first.reward == pytest.approx(sum(first.turn_rewards))
    assert second.reward == pytest.approx(plain[1].reward - 2.0)
    assert second.rewards == {"short": 1.0, "reward_model": pytest.approx(plain[1].reward)}
    assert [row.rewards for row in plain] == [{}, {"short": 1.0}]


@pytest.mark.parametrize("on_timeout", ["zero", "partial"])
def test_an_episode_that_ran_out_of_time_is_scored_only_where_its_part_counts(
    tiny_model_path: Path, tmp_path: Path, one_rank: None, on_timeout: Literal["zero", "partial"]
) -> None:
    rows = [make_turns_row("rR", [1.0], 1.0), replace(make_turns_row("rR", [0.0], 0.0), finish_reason="timeout")]
    group = replace(make_group(0, [3, 4], rows), episodes=make_episodes([1, 1]))
    task = TaskConfig(name="reasoning_gym/chain_sum", tools=["my_tools:search"], on_timeout=on_timeout)
    reward_model = open_reward_model(tiny_model_path, save_bare_reward_model(tmp_path / "rm"), task=task)
    done, late = reward_model.score(batch_of(group)).groups[0].rows
    late_reward = 0.0 if on_timeout == "zero" else done.reward
    assert done.reward not in (0.0, 1.0)
    assert (late.reward, late.turn_rewards) == (late_reward, (late_reward,))


def test_a_reward_model_with_another_vocabulary_can_not_read_calls_of_tools(tmp_path: Path, one_rank: None) -> None:
    save_tiny_model("tiny-qwen2", tmp_path / "policy", 0)
    tokenizer = character_tokenizer()
    tokenizer.add_tokens(["2 + 3"])
    save_bare_reward_model(tmp_path / "rm", vocab=len(tokenizer), pad_token_id=0)
    tokenizer.save_pretrained(tmp_path / "rm")
    task = TaskConfig(name="reasoning_gym/chain_sum", tools=["my_tools:search"])
    config = learner_config(tmp_path / "policy", task=task, reward_model=RewardModelConfig(path=str(tmp_path / "rm")))
    with pytest.raises(ConfigError, match=r"^reward_model\.path .*task\.tools"):
        RewardModel(config, CPU, torch.float32, Ranks(init_device_mesh("cpu", (1,))))


def test_a_model_with_several_labels_and_an_answer_beyond_its_positions_are_refused(
    tiny_model_path: Path, tmp_path: Path, one_rank: None
) -> None:
    with pytest.raises(ConfigError, match=r"^reward_model\.path .*got 3"):
        open_reward_model(tiny_model_path, save_bare_reward_model(tmp_path / "three", num_labels=3))
    short = open_reward_model(tiny_model_path, save_bare_reward_model(tmp_path / "short", max_position_embeddings=8))
    with pytest.raises(AsyncRLError, match=r"\d+ tokens.* 8 positions"):
        short.score(make_batch())
    shape = SHAPE | {"vocab_size": VOCAB, "max_position_embeddings": 10, "pad_token_id": 1}
    RobertaForSequenceClassification(RobertaConfig(**shape)).save_pretrained(tmp_path / "encoder")
    with pytest.raises(AsyncRLError, match=r"9 tokens.* 8 positions"):
        open_reward_model(tiny_model_path, tmp_path / "encoder").score(
            batch_of(make_group(0, [3] * 4, [make_row([5] * 5, [-1.0] * 5, 0.0)]))
        )


def test_an_update_trains_on_the_models_rewards_and_reports_both(
    tiny_model_path: Path, tmp_path: Path, one_rank: None
) -> None:
    path = str(save_bare_reward_model(tmp_path / "rm"))
    config = learner_config(tiny_model_path, reward_model=RewardModelConfig(path=path))
    assert not config.drops_zero_variance  # by the rule's rewards, which nothing is trained on
    batch = make_batch()
    scored = open_reward_model(tiny_model_path, tmp_path / "rm").score(batch)
    found = {metric.key: metric.value for metric in Updater(config, CPU).update(batch)}
    expected = {metric.key: metric.value for metric in Updater(learner_config(tiny_model_path), CPU).update(scored)}
    assert found.pop("reward/rule_mean") == pytest.approx(sum(rewards_of(batch)) / 12)
    assert -1 <= found.pop("reward/rule_correlation", 0.0) <= 1  # absent where the rule gives all the same
    assert found["reward/mean"] == pytest.approx(sum(rewards_of(scored)) / 12)
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_a_reward_that_is_no_number_ends_the_run_and_names_the_reward_model(
    tiny_model_path: Path, tmp_path: Path, one_rank: None
) -> None:
    folder = save_bare_reward_model(tmp_path / "rm")
    lm = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    torch.nn.init.constant_(lm.score.weight, 3e38)  # a number, but no reward is one
    lm.save_pretrained(folder)
    reward_model = open_reward_model(tiny_model_path, folder)
    batch = batch_of(make_group(0, [3, 4], [make_turns_row("rR", [1.0], 1.0), make_turns_row("rR", [1.0], 1.0)]))
    with pytest.raises(AsyncRLError, match=r"^reward_model\.path: \d of its 2 "):
        reward_model.score(batch)
