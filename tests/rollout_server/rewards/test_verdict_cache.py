"""Verdicts that are kept in the run directory, so that no answer is scored twice."""

from __future__ import annotations

import importlib
import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from async_rl.base.config import Config, JudgePlacement
from async_rl.base.config.task_parts import SandboxConfig
from async_rl.base.errors import ConfigError, RewardError
from rollout_server.question import Question
from rollout_server.rewards.code.checker import CODE
from rollout_server.rewards.contract import Reward, RewardResult
from rollout_server.rewards.judge import JUDGE
from rollout_server.rewards.scoring import open_rewards
from rollout_server.rewards.verdict_cache import identity
from tests.kit.configs import changed, make_config
from tests.kit.judges import judged_by
from tests.kit.rewards import is_right, named, of, scored


def with_folder(folder: Path) -> Config:
    config = changed(make_config(), run={"dir": folder})
    config.run_dir.mkdir(exist_ok=True)
    return config


def test_a_verdict_on_the_same_input_is_asked_for_once_also_by_the_next_run(tmp_path: Path) -> None:
    asked: list[str] = []

    def count(question: Question, response: str) -> RewardResult:
        asked.append(response)
        return RewardResult(len(response), {"seen": 1.0})

    reward = [named(Reward(function=count, is_function_of_input=True), name="count", identity=b"1")]
    config = with_folder(tmp_path)
    verdicts, counts = scored(reward, "a", "bb", "a", config=config, groups=2)
    assert asked == ["a", "bb"] and [each.reward for each in verdicts] == [1, 2, 1]
    assert verdicts[0].values == {"count": 1, "count/seen": 1}
    assert counts["scoring/count/cached"] == 1 + 3 and counts["scoring/count/calls"] == 2
    scored(reward, "a", config=config)
    assert asked == ["a", "bb"]
    other = [named(reward[0].reward, name="count", identity=b"2")]  # its code or settings have changed
    scored(other, "a", config=config)
    assert asked == ["a", "bb", "a"]
    with closing(sqlite3.connect(config.run_dir / "rewards.sqlite")) as database:
        kept = database.execute("SELECT reward, ground_truth, answer, score FROM verdicts ORDER BY answer").fetchall()
    assert kept == [("count", "4", "a", 1.0), ("count", "4", "a", 1.0), ("count", "4", "bb", 2.0)]


def test_neither_errors_nor_missing_verdicts_are_kept(tmp_path: Path) -> None:
    results = iter([None, 1 / 3])
    reward = [named(Reward(function=lambda *_: next(results), is_function_of_input=True))]
    assert [scored(reward, "a", config=with_folder(tmp_path))[0][0].reward for _ in range(3)] == [None, 1 / 3, 1 / 3]

    outcomes = [1 / 2, ValueError("down")]

    def fails_first(question: Question, response: str) -> float:
        outcome = outcomes.pop()
        if isinstance(outcome, ValueError):
            raise outcome
        return outcome

    failing = [named(Reward(function=fails_first, is_function_of_input=True), identity=b"other")]
    with pytest.raises(RewardError, match="down"):
        scored(failing, "a", config=with_folder(tmp_path))
    assert scored(failing, "a", config=with_folder(tmp_path))[0][0].reward == 0.5


def test_a_cache_that_can_not_be_used_costs_a_warning(tmp_path: Path) -> None:
    config = with_folder(tmp_path)
    (config.run_dir / "rewards.sqlite").write_text("no database" * 100)
    with pytest.warns(UserWarning, match=r"rewards\.sqlite"):
        reward = named(Reward(function=is_right, is_function_of_input=True))
        verdicts, _ = scored([reward], "4", config=config, groups=2)
    assert verdicts[0].reward == 1


def within(question: Question, response: str, limit: object = 1) -> float:
    return float(len(response) < int(str(limit)))


def kept(function: Callable[..., object]) -> Reward:
    return Reward(function=function, is_function_of_input=True)


def identities(*rewards: Reward) -> set[bytes]:
    return {identity("", reward, None) for reward in rewards}


def test_the_arguments_of_a_partial_are_part_of_the_identity() -> None:
    different = [
        within, partial(within), partial(within, limit=1), partial(within, limit=2), partial(within, limit=[1, 2]),
        partial(partial(within, limit=1), limit=3), partial(within, limit=is_right), partial(within, limit=Path),
    ]  # fmt: skip
    assert len(identities(*map(kept, different))) == len(different)
    assert identities(kept(partial(within, limit=2))) == identities(kept(partial(within, limit=2)))
    for value in (object(), lambda: 1, {1, 2}):
        with pytest.raises(ConfigError, match=r"'m:R' .*is_function_of_input"):
            identity("m:R", kept(partial(within, limit=value)), None)


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the modules of a user: a reward, what it imports, and a decorator."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "cached_parser.py").write_text("def parse(question, response, limit=1): return limit\n")
    (tmp_path / "cached_decorator.py").write_text(
        "import functools\n"
        "def twice(f):\n"
        "    @functools.wraps(f)\n"
        "    def g(*a): return 2 * f(*a)\n"
        "    return g\n"
    )
    (tmp_path / "cached_rewards.py").write_text(
        "from functools import partial\nfrom rollout_server.rewards.contract import Reward\n"
        "from cached_parser import parse\nfrom cached_decorator import twice\n"
        "LIMITED = Reward(function=partial(parse, limit=2), is_function_of_input=True)\n"
        "@twice\n"
        "def doubled(question, response): return parse(question, response)\n"
        "DOUBLED = Reward(function=doubled, is_function_of_input=True)\n"
        "DECLARED = Reward(function=doubled, is_function_of_input=True, modules=('cached_parser',))\n"
    )
    return tmp_path


def identity_of(name: str) -> bytes:
    """The identity of one of the user's rewards, in a run that begins now."""
    for module in [module for module in sys.modules if module.startswith("cached_")]:
        del sys.modules[module]
    importlib.invalidate_caches()
    (reward,) = open_rewards(of({"reward": f"cached_rewards:{name}", "name": "user"}), None)  # type: ignore[arg-type]
    return reward.identity


@pytest.mark.parametrize(
    ("name", "changed_module", "counts"),
    [("LIMITED", "cached_parser", True), ("LIMITED", "cached_decorator", False), ("DOUBLED", "cached_rewards", True),
     ("DOUBLED", "cached_decorator", True), ("DOUBLED", "cached_parser", False), ("DECLARED", "cached_parser", True)],
)  # fmt: skip
def test_the_modules_that_define_or_are_named_by_a_reward_are_part_of_its_identity(
    modules: Path, name: str, changed_module: str, counts: bool
) -> None:
    before = identity_of(name)
    assert identity_of(name) == before
    with (modules / f"{changed_module}.py").open("a") as file:
        file.write("# another line\n")
    assert (identity_of(name) != before) == counts


def test_the_sandbox_of_programs_and_what_changes_a_judge_are_part_of_the_identity() -> None:
    assert CODE.inputs is not None and JUDGE.inputs is not None
    assert set(JUDGE.modules) == {"rollout_server.rewards.judge_verdicts"}
    sandboxes = [SandboxConfig(), SandboxConfig(kind="none"), SandboxConfig(url="http://h")]
    assert len({CODE.inputs(changed(make_config(), task={"sandbox": each})) for each in sandboxes}) == 3

    def judged(params: dict[str, object] | None = None, url: str = "http://h/v1", **judge: object) -> bytes:
        (reward,) = open_rewards(judged_by(url, params=params, **judge), None)  # type: ignore[arg-type]
        return reward.identity

    every = [
        judged(), judged({"prompt": "{answer}?"}), judged({"system": "s"}), judged({"max_tokens": 9}),
        judged({"temperature": 0.5}), judged({"structured": False}), judged({"body": {"seed": 1}}),
        judged({"low": 1.0}), judged({"high": 5.0}), judged(url="http://other/v1"), judged(model="m"),
    ]  # fmt: skip
    assert len(set(every)) == len(every)
    assert judged() == judged(patience_s=5.0, timeout_s=5.0, concurrency=3)  # they change no verdict

    served = [
        changed(make_config(), judge=judge, placement={"judge": JudgePlacement(servers=1)})
        for judge in ({"path": "a"}, {"path": "b"}, {"path": "a", "server_args": {"quantization": "fp8"}})
    ]
    assert len({str(JUDGE.inputs(config)) for config in served}) == 3
