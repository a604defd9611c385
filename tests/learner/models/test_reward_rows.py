"""The texts that a reward model with a tokenizer of its own gets for the prompts of a run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from torch import device, float32
from torch.distributed.device_mesh import init_device_mesh
from transformers import (
    AutoTokenizer,
    PreTrainedTokenizerBase,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from async_rl.config import Config, RewardModelConfig, TaskConfig
from async_rl.driver.preflight import input_checks
from async_rl.errors import ConfigError
from learner.models.reward_model import RewardModel
from learner.models.reward_rows import RewardRows
from learner.models.tiny_model import character_tokenizer
from learner.ranks import Ranks
from rollout_server.tasks.chat import prompt_text, prompt_tokens
from tests.kit.configs import make_config
from tests.kit.groups import batch_of, make_group, make_row
from tests.kit.models import save_bare_reward_model, save_tool_model
from tests.kit.tokenizers import tokenizer_of

SHOWS_ROLES = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }};{% endfor %}"
REFUSES_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
) + SHOWS_ROLES
LEAVES_SYSTEM_OUT = (
    "{% for m in messages %}{% if m['role'] != 'system' %}[{{ m['role'] }}] {{ m['content'] }};{% endif %}{% endfor %}"
)
THINKS_FIRST = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
"""The form of Qwen3's template."""


def said(*texts: str) -> list[dict[str, str]]:
    """Return messages; a text is that of the user unless it begins with the name of another role."""
    messages = []
    for text in texts:
        role, _, content = text.rpartition(": ")
        messages.append({"role": role or "user", "content": content})
    return messages


def save_policy(folder: Path, template: str | None) -> PreTrainedTokenizerBase:
    save_tool_model(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    if template is None:
        (folder / "chat_template.jinja").unlink()
    return AutoTokenizer.from_pretrained(folder)


def save_reward_tokenizer(folder: Path, template: str | None) -> None:
    own = character_tokenizer()
    own.chat_template = template
    own.save_pretrained(folder)


def asked(tokenizer: Any, messages: list[dict[str, str]], task: TaskConfig) -> list[int]:
    """Return the prompt as a task makes it."""
    first = [{"role": "system", "content": task.system_prompt}] if task.system_prompt else []
    text = prompt_text(tokenizer, [*first, *messages], "a test", task.chat_template_kwargs)
    return prompt_tokens(tokenizer, text)


def task_of(**settings: Any) -> TaskConfig:
    return TaskConfig(name="reasoning_gym/spell_backward", **settings)


def text_of(tmp_path: Path, policy: PreTrainedTokenizerBase, prompt: list[int], task: TaskConfig) -> str:
    rows = RewardRows(str(tmp_path / "policy"), str(tmp_path / "rm"), task)
    row = rows.row(prompt, policy("it is 5<|im_end|>", add_special_tokens=False)["input_ids"])
    text: str = AutoTokenizer.from_pretrained(tmp_path / "rm").decode(row.tokens)
    return text


CONVERSATIONS = {
    "[user] 2 + 3?;": said("2 + 3?"),
    "[user] <think> twice\nin <b>two</b> lines;": said("<think> twice\nin <b>two</b> lines"),
    "[system] Be brief.;[user] 2 + 3?;": said("system: Be brief.", "2 + 3?"),
    "[user] hi;[assistant] yes?;[user] 2 + 3?;": said("hi", "assistant: yes?", "2 + 3?"),
    "[system] A;[user] b;[assistant] c;[user] d;[assistant] e;[user] f;":
        said("system: A", "b", "assistant: c", "d", "assistant: e", "f"),
}  # fmt: skip


@pytest.mark.parametrize("thinks", [None, True, False])
@pytest.mark.parametrize(("system", "expected"), [
    (system, expected) for system in ("", "Think in <think>.\n\nThen answer.") for expected in CONVERSATIONS
    if not (system and expected.startswith("[system]"))  # a run refuses two system messages
])  # fmt: skip
def test_a_reward_model_gets_the_messages_of_a_prompt_in_its_own_template(
    tmp_path: Path, thinks: bool | None, system: str, expected: str
) -> None:
    task = task_of(system_prompt=system, chat_template_kwargs={} if thinks is None else {"enable_thinking": thinks})
    policy = save_policy(tmp_path / "policy", THINKS_FIRST)
    save_reward_tokenizer(tmp_path / "rm", SHOWS_ROLES)
    prompt = asked(policy, CONVERSATIONS[expected], task)
    assert policy.decode(prompt).endswith("</think>\n\n") == (thinks is False)
    text = text_of(tmp_path, policy, prompt, task)
    assert text == (f"[system] {system};" if system else "") + expected + "[assistant] it is 5;"


@pytest.mark.parametrize("family", ["qwen2_5", "qwen3", "llama3_2", "glm4moe"])
@pytest.mark.parametrize("system", ["", "Think in <think>."])
def test_prompts_in_the_templates_of_model_families_are_read(tmp_path: Path, family: str, system: str) -> None:
    policy, task = tokenizer_of(family), task_of(system_prompt=system, chat_template_kwargs={"enable_thinking": False})
    policy.save_pretrained(tmp_path / "policy")
    save_reward_tokenizer(tmp_path / "rm", SHOWS_ROLES)
    for expected, messages in CONVERSATIONS.items():
        if not (system and messages[0]["role"] == "system"):
            prompt = asked(policy, messages, task)
            rows = RewardRows(str(tmp_path / "policy"), str(tmp_path / "rm"), task)
            assert rows.can_read(prompt), (family, messages)
            text = AutoTokenizer.from_pretrained(tmp_path / "rm").decode(rows.row(prompt, []).tokens)
            assert text == (f"[system] {system};" if system else "") + expected + "[assistant] ;"


def test_a_prompt_with_the_date_of_another_day_is_read(tmp_path: Path) -> None:
    policy = tokenizer_of("llama3_2")
    policy.save_pretrained(tmp_path / "policy")
    save_reward_tokenizer(tmp_path / "rm", SHOWS_ROLES)
    text = policy.apply_chat_template(
        said("2 + 3?"), tokenize=False, add_generation_prompt=True, strftime_now=lambda _: "01 Jan 1970"
    )
    rows = RewardRows(str(tmp_path / "policy"), str(tmp_path / "rm"), task_of())
    assert "01 Jan 1970" in text and rows.can_read(prompt_tokens(policy, text))


def test_the_own_template_of_a_reward_model_writes_the_date_of_all_prompts(tmp_path: Path) -> None:
    policy = save_policy(tmp_path / "policy", THINKS_FIRST)
    tokenizer_of("llama3_2").save_pretrained(tmp_path / "rm")
    text = text_of(tmp_path, policy, asked(policy, said("2 + 3?"), task_of()), task_of())
    assert "Today Date: 26 Jul 2024\n" in text and text.endswith("it is 5<|eot_id|>")


@pytest.mark.parametrize(("own", "expected"), [
    (REFUSES_SYSTEM, "[user] Be brief.\n\n2 + 3?;[assistant] it is 5;"),
    (LEAVES_SYSTEM_OUT, "[user] Be brief.\n\n2 + 3?;[assistant] it is 5;"),
    (None, "Be brief.\n2 + 3?it is 5"),
])  # fmt: skip
@pytest.mark.parametrize("policys", [THINKS_FIRST, None])
def test_a_system_message_stands_before_the_question_where_no_template_takes_it(
    tmp_path: Path, own: str | None, expected: str, policys: str | None
) -> None:
    policy, task = save_policy(tmp_path / "policy", policys), task_of(system_prompt="Be brief.")
    save_reward_tokenizer(tmp_path / "rm", own)
    assert text_of(tmp_path, policy, asked(policy, said("2 + 3?"), task), task) == expected


def unread_run(tmp_path: Path) -> tuple[Config, list[int], list[int]]:
    """Return a run with a prompt that cannot be read, this prompt and one that can."""
    policy = save_policy(tmp_path / "policy", THINKS_FIRST)
    save_bare_reward_model(tmp_path / "rm", vocab=len(character_tokenizer()), pad_token_id=0)
    save_reward_tokenizer(tmp_path / "rm", SHOWS_ROLES)
    row = {"prompt": said("hi", "2 + 3?"), "data_source": "x", "reward_model": {"ground_truth": "5"}}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    task = TaskConfig(
        path=str(tmp_path / "rows.jsonl"), eval_path=str(tmp_path / "rows.jsonl"),
        reward="tests.extensions.reward:answer_length",
    )  # fmt: skip
    config = make_config(
        tmp_path / "policy", task=task, reward_model=RewardModelConfig(path=str(tmp_path / "rm"))
    )
    return config, asked(policy, said("hi", "2 + 3?"), task), asked(policy, said("2 + 3?"), task)


def test_a_prompt_of_another_form_is_a_caution_and_is_given_whole(tmp_path: Path) -> None:
    config, unread, _ = unread_run(tmp_path)
    (found,) = (each for each in input_checks(config) if each.what == "reward_model's rows")
    (caution,) = found.run() or ()
    assert caution.startswith("reward_model.path: the model gets a prompt of x with the text of the policy's chat")
    policy = AutoTokenizer.from_pretrained(tmp_path / "policy")
    assert text_of(tmp_path, policy, unread, config.task) == (
        "[user] <|im_start|>user\nhi<|im_end|>\n<|im_start|>user\n2 + 3?<|im_end|>\n<|im_start|>assistant\n;"
        "[assistant] it is 5;"
    )
    row = json.loads((tmp_path / "rows.jsonl").read_text()) | {"prompt": said("2 + 3?")}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    (found,) = (each for each in input_checks(config) if each.what == "reward_model's rows")
    assert found.run() == []


def test_too_few_positions_for_the_longest_row_are_refused_or_a_caution(tmp_path: Path) -> None:
    config, *_ = unread_run(tmp_path)
    (found,) = (each for each in input_checks(config) if each.what == "reward_model's rows")
    save_bare_reward_model(tmp_path / "rm", vocab=len(character_tokenizer()), max_position_embeddings=100)
    caution, _ = found.run() or ()
    assert "has 100 positions" in caution and f"they may be {config.longest_tokens}." in caution
    shutil.rmtree(tmp_path / "rm")
    save_bare_reward_model(tmp_path / "rm", max_position_embeddings=100)  # without a tokenizer it reads the policy's
    refused = rf"reward_model.path .* must have {config.longest_tokens} or more positions"
    with pytest.raises(ConfigError, match=f"{refused}.*, got 100"):
        found.run()
    shutil.rmtree(tmp_path / "rm")
    encoder = RobertaConfig(  # the first two rows of its table of positions are of no use
        vocab_size=len(character_tokenizer()), hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, num_labels=1, pad_token_id=1, max_position_embeddings=config.longest_tokens + 1,
    )  # fmt: skip
    RobertaForSequenceClassification(encoder).save_pretrained(tmp_path / "rm")
    with pytest.raises(ConfigError, match=f"{refused}.*, got {config.longest_tokens - 1}"):
        found.run()


def test_prompts_of_another_form_are_counted_in_each_step(tmp_path: Path, one_rank: None) -> None:
    config, unread, read = unread_run(tmp_path)
    model = RewardModel(config, device("cpu"), float32, Ranks(init_device_mesh("cpu", (1,))))
    groups = [make_group(i, prompt, [make_row([5, 2], [-1.0] * 2, 0.0)]) for i, prompt in enumerate((unread, read))]
    (metric,) = model.prompt_metrics(batch_of(*groups))
    assert (metric.key, metric.value) == ("batch/unread_prompts", 1)
