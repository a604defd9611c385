"""Names in the tables for users of TRL and verl are answered with the keys of their rows, and with no others."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from async_rl.config import Config
from async_rl.config.loading import load_config
from async_rl.config.schema import _leaves
from async_rl.errors import ConfigError

DOCS = Path(__file__).parents[2] / "docs"
LEAVES = {*_leaves(Config)}
OWN_NAMES = {leaf.rpartition(".")[2] for leaf in LEAVES}
SECTIONS = {leaf.partition(".")[0] for leaf in LEAVES}
OF_VERL = {"data", "actor_rollout_ref", "critic", "trainer", "algorithm", "reward_model", "custom_reward_function"}
"""The sections of verl's configuration that are on the page."""
MINIMAL = {"model": {"path": "m"}, "task": {"path": "a.jsonl"}}


class Row(NamedTuple):
    """A row of a table, and one of the names in it."""

    name: str
    ours: set[str]
    """The keys here in its second column."""
    allowed: set[str]
    """These, and those in its note."""


def keys_in(text: str) -> set[str]:
    """The keys of ours that a text names; of free names, such as algorithm.params.dual, those that hold them."""
    found = re.findall(rf"(?<![\w.])(?:{'|'.join(SECTIONS)})(?:\.[a-z]\w*)+", text)
    return {next((leaf for leaf in LEAVES if key == leaf or key.startswith(f"{leaf}.")), key) for key in found}


def rows_of(page: str) -> Iterator[tuple[list[str], Row]]:
    for line in (DOCS / page).read_text().splitlines():
        if line.startswith("| `"):
            _, names, ours, note, _ = line.split("|")
            yield re.findall(r"`([^`]+)`", names), Row("", keys_in(ours), keys_in(ours + note))


def rows_of_trl() -> list[Row]:
    """The names that are no settings here, of which the others are answered with all settings of that name."""
    return [
        row._replace(name=name) for names, row in rows_of("from-trl.md") for name in names
        if name not in OWN_NAMES | SECTIONS or name == "delta"
    ]


def rows_of_verl() -> list[Row]:
    """The whole keys, of which the table leaves out the first parts where they are those of the name before."""
    found: list[Row] = []
    for names, row in rows_of("from-verl.md"):
        names = [name.partition(":")[0] for name in names if "/" not in name and name != "sandbox_fusion"]
        before = names[0].rpartition(".")[0] if names else ""
        for name in names:
            section = name.partition(".")[0]
            above = "" if section in OF_VERL else "actor_rollout_ref." if section == "ref" else f"{before}."
            whole = f"{above}{name}"
            if whole not in LEAVES:
                found.append(row._replace(name=whole))
    return found


def refusal(key: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(MINIMAL, [f"{key}=1"])
    return str(caught.value)


def check_answer(key: str, row: Row) -> None:
    message = refusal(key)
    begin = f"unknown key {key} (command line); "
    assert message.startswith(begin) and "\n" not in message
    said = message.removeprefix(begin)
    assert "did you mean" not in said and "allowed" not in said, message
    assert keys_in(said) <= row.allowed, message
    assert keys_in(said) & row.ours or not row.ours, message


def test_the_tables_are_read_whole() -> None:
    assert len(rows_of_trl()) > 100 and len(rows_of_verl()) > 50
    assert {row.name for row in rows_of_verl()} >= {
        "actor_rollout_ref.actor.kl_loss_coef", "actor_rollout_ref.ref.fsdp_config.param_offload", "data.val_files",
        "algorithm.kl_ctrl.type", "actor_rollout_ref.actor.optim.lr_scheduler_type", "custom_reward_function.name",
    }


@pytest.mark.parametrize("row", rows_of_trl(), ids=lambda row: row.name)
def test_a_name_of_trls_is_answered_with_the_keys_of_its_row(row: Row) -> None:
    check_answer(row.name, row)
    if row.name not in ("beta", "delta", "max_steps"):  # these could mean something else in a section
        check_answer(f"learner.{row.name}", row)


@pytest.mark.parametrize("row", rows_of_verl(), ids=lambda row: row.name)
def test_a_key_of_verls_is_answered_with_the_keys_of_its_row(row: Row) -> None:
    check_answer(row.name, row)


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("rollout.n=8", "rollout.n (command line); it is rollout.group_size"),
        ("actor.optim.lr=1", "actor.optim.lr (command line); it is learner.lr"),
        ("algorithm.adv_estimator=grpo", "it is algorithm.advantage"),
        ("algorithm.clip_ratio_c=3", "it is algorithm.params: {dual: ...}"),
        ("task.prompt_key=question", "it is task.columns.prompt"), ("task.dataset=openai/gsm8k", "it is task.path"),
        ("param_offload=true", "it is learner.offload: all or reference.offload"),
        ("eval.max_tokens=100", "it is rollout.max_response_tokens, for held-out prompts too"),
        ("eval.n=4", "it is eval.samples"), ("learner.warmup_ratio=0.1", "it is learner.warmup_steps, a number of"),
        ("rollout.stop_strings=[a]", "it is rollout.stop"), ("data=x", "prompts are in task.path"),
        ("rolout={n: 8, max_tokens: 9}", "unknown key rolout (command line); did you mean rollout?"),
        ("reward_func=x", "allowed at the top"),
    ],
)
def test_a_name_is_answered_in_other_places_too(key: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(MINIMAL, [key])
    assert said in str(caught.value)


def test_a_file_in_verls_form_is_refused_with_each_of_its_keys_and_their_lines(tmp_path: Path) -> None:
    (tmp_path / "verl.yaml").write_text(
        "model: {path: m}\ntask: {path: a.jsonl}\nactor_rollout_ref:\n  actor:\n    ppo_epochs: 2\n    strategy: fsdp\n"
        "  rollout:\n    n: 8\ntrainer:\n  nnodes: 1\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "verl.yaml")
    lines = str(caught.value).splitlines()
    key = "unknown key actor_rollout_ref"
    assert [line.replace(f"{tmp_path}/", "") for line in lines[:3]] == [
        f"{key}.actor.ppo_epochs (verl.yaml:5); it is algorithm.epochs",
        f"{key}.actor.strategy (verl.yaml:6); there is none of this name here; docs/from-verl.md and docs/from-trl.md "
        "have the names of other packages",
        f"{key}.rollout.n (verl.yaml:8); it is rollout.group_size",
    ]
    assert "trainer.nnodes" in lines[3] and "it is placement.learner.nodes" in lines[3]
