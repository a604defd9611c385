"""The rewards of a judge: prompts, scores, comparisons in both orders, rankings, what is kept, what is refused."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest

from async_rl.base.errors import ConfigError
from rollout_server.question import Question
from rollout_server.rewards.judge import pairs_of
from rollout_server.rewards.scoring import Verdict, open_rewards
from tests.kit.judges import Answer, FakeJudge, judged_by, score, verdicts_and_counts
from tests.kit.rewards import QUESTION


def asked(
    reward: str, answer: Answer, *answers: str, question: Question = QUESTION, **params: Any
) -> tuple[list[Verdict], dict[str, float], FakeJudge]:
    async def ask() -> tuple[list[Verdict], dict[str, float], FakeJudge]:
        fake = FakeJudge(answer)
        async with fake.serve() as url:
            config = judged_by(url, reward, params)
            found, counts = await verdicts_and_counts(config, *answers, question=question)
        return found, counts, fake

    return asyncio.run(ask())


def rewards(found: list[Verdict]) -> list[float | None]:
    return [verdict.reward for verdict in found]


def test_a_score_is_a_share_of_the_scale_and_its_cost_is_counted() -> None:
    found, counts, fake = asked("judge", lambda body: score(4), "x", "y", low=-1.0, high=9.0)
    assert rewards(found) == [0.5, 0.5] and found[0].values == {"judge": 0.5}
    assert counts["scoring/judge/prompt_tokens"] == 20 and counts["scoring/judge/completion_tokens"] == 10
    (body, _) = fake.asked
    described = body["response_format"]["json_schema"]["schema"]["properties"]["score"]
    assert (described["minimum"], described["maximum"]) == (-1, 9) and body["temperature"] == 0


def test_places_of_the_prompt_are_filled_in_one_pass() -> None:
    question = Question(messages=({"role": "user", "content": "{answer}?"},), ground_truth={"n": "{question}"})
    template = r'Q {question} R {reference} A {answer} {other} {"score": 1} \frac{a}{b} { x }'
    _, _, fake = asked(
        "judge", lambda body: score(4), "{reference}", question=question, prompt=template, system="be strict, {answer}",
        structured=False, max_tokens=9, temperature=0.5, body={"seed": 3},
    )
    (body,) = fake.asked
    assert fake.prompts == [r'Q {answer}? R {"n": "{question}"} A {reference} {other} {"score": 1} \frac{a}{b} { x }']
    assert body["messages"][0] == {"role": "system", "content": "be strict, {answer}"} and "response_format" not in body
    assert (body["max_tokens"], body["temperature"], body["seed"]) == (9, 0.5, 3)


def longest(body: dict[str, Any]) -> str:
    """A judge that finds the longer answer better."""
    a, b = re.findall(r"Answer [AB];.*\n(.*)", body["messages"][-1]["content"])
    return json.dumps({"better": "A" if len(a) > len(b) else "B"})


def test_pairs_are_compared_in_both_orders() -> None:
    found, counts, fake = asked("judge_pairwise", longest, "xx", "x", "xxxx", "xxxx")
    assert rewards(found) == pytest.approx([1 / 3, 0, 2.5 / 3, 2.5 / 3])  # two equal answers tie and are not asked for
    assert len(fake.asked) == 2 * 5 == counts["scoring/judge_pairwise/requests"]
    assert counts["scoring/judge_pairwise/disagreed"] == 0


def test_a_judge_that_prefers_the_first_answer_gives_ties_which_are_counted() -> None:
    found, counts, _ = asked("judge_pairwise", lambda body: "A", "x", "y", "z")
    assert rewards(found) == [0.5, 0.5, 0.5] and counts["scoring/judge_pairwise/disagreed"] == 3


def test_a_comparison_without_verdict_is_left_out() -> None:
    def judge(body: dict[str, Any]) -> str:
        return "I can't say" if "hard" in body["messages"][-1]["content"] else longest(body)

    found, counts, _ = asked("judge_pairwise", judge, "x", "xx", "hard")
    assert rewards(found) == [0, 1, None] and "I can't say" in found[2].reason
    assert counts["scoring/judge_pairwise/unreadable"] == 4 and counts["scoring/judge_pairwise/no_verdict"] == 1
    alone, _, _ = asked("judge_pairwise", judge, "x")
    assert rewards(alone) == [None]


@pytest.mark.parametrize(
    ("size", "opponents", "pairs"),
    [(4, 0, 6), (4, 3, 6), (6, 2, 6), (6, 3, 12), (2, 1, 1), (1, 0, 0), (8, 1, 8)],
)
def test_each_answer_meets_enough_opponents(size: int, opponents: int, pairs: int) -> None:
    met = pairs_of(size, opponents)
    assert len(met) == len(set(met)) == pairs and all(first < second for first, second in met)
    counts = [sum(each in pair for pair in met) for each in range(size)]
    assert min(counts) >= (opponents or size - 1)


def shortest_first(body: dict[str, Any]) -> str:
    shown = re.findall(r"^(\d+):\n(.*)", body["messages"][-1]["content"], re.MULTILINE)
    return json.dumps({"ranking": [int(number) for number, _ in sorted(shown, key=lambda each: len(each[1]))]})


def test_a_group_is_ranked_in_two_orders() -> None:
    found, counts, fake = asked("judge_listwise", shortest_first, "xxx", "x", "xx", structured=True)
    assert rewards(found) == [0, 1, 0.5] and len(fake.asked) == 2
    assert "1:\nxxx" in fake.prompts[0] + fake.prompts[1] and "3:\nxxx" in fake.prompts[0] + fake.prompts[1]
    assert counts["scoring/judge_listwise/disagreed"] == 0
    same, counts, _ = asked("judge_listwise", lambda body: "1 > 2 > 3", "a", "b", "c")
    assert rewards(same) == [0.5, 0.5, 0.5] and counts["scoring/judge_listwise/disagreed"] == 1


def test_a_group_without_a_readable_ranking_has_no_verdict() -> None:
    found, counts, _ = asked("judge_listwise", lambda body: "1 > 2", "a", "b", "c")
    assert rewards(found) == [None] * 3 and counts["scoring/judge_listwise/unreadable"] == 2
    assert rewards(asked("judge_listwise", shortest_first, "a")[0]) == [None]


@pytest.mark.parametrize(("reward", "params", "judge", "key"), [
    ("judge", {}, {"urls": ()}, r"task\.rewards\[0\] .*judge\.path"),
    ("judge_pairwise", {"prompt": "{answer_a}"}, {}, r"task\.rewards\[0\]\.params\.prompt .*\{answer_b\}"),
    ("judge", {"low": 3.0, "high": 3.0}, {}, r"task\.rewards\.params\.high"),
    ("judge", {"opponents": 2}, {}, r".*task\.rewards\[0\]\.params\.opponents"),
    ("judge", {}, {"patience_s": 4000.0}, r"timeouts\.batch_s .*4120"),
])  # fmt: skip
def test_a_judge_that_can_not_work_is_refused(
    reward: str, params: dict[str, Any], judge: dict[str, Any], key: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{key}"):
        open_rewards(judged_by("http://h/v1", reward, params, **judge), None)  # type: ignore[arg-type]
