from __future__ import annotations

import shutil
from collections import Counter
from typing import Any

import numpy as np
import pytest
import reasoning_gym
from reasoning_gym.composite import DatasetSpec
from reasoning_gym.factory import DATASETS

from async_rl.base.config import Config
from async_rl.base.errors import ConfigError
from learner.models.tiny_model import character_tokenizer
from rollout_server.question import Question
from rollout_server.tasks.base import Task, open_task
from rollout_server.tasks.reasoning_gym_answers import only_compares
from rollout_server.tasks.reasoning_gym_scorer import ReasoningGymScorer
from tests.kit.configs import make_config
from tests.kit.tokenizers import tokenizer_of

pytestmark = pytest.mark.processes  # together they compute for long

TOKENIZER = character_tokenizer()
SANDBOX = {"kind": "bubblewrap" if shutil.which("bwrap") else "none"}


def config_of(name: str = "spell_backward", *, seed: int = 0, eval_size: int = 50, **task: Any) -> Config:
    return make_config(
        task={"name": f"reasoning_gym/{name}", "size": 100, **task}, run={"seed": seed},
        eval={"num_prompts": eval_size},
    )


def texts(task: Task, indices: range) -> list[str]:
    return [task.prompt(i).text for i in indices]


def test_another_seed_trains_on_other_questions_and_holds_out_the_same() -> None:
    one, other = (open_task(config_of(seed=seed, eval_size=size), TOKENIZER) for seed, size in ((0, 50), (1, 20)))
    assert texts(one, range(100)) != texts(other, range(100))
    held_out = [[prompt.text for prompt in task.eval_prompts()] for task in (one, other)]
    assert len(held_out[0]) == 50 and held_out[0][:20] == held_out[1]  # a smaller set is the beginning of a larger one


def test_training_and_held_out_questions_of_a_small_task_are_disjoint() -> None:
    # 1-digit sums of two terms: 200 different questions, so 1000 random ones hit each of 50 held-out ones.
    params = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    task = open_task(config_of("chain_sum", params=params, size=1000), TOKENIZER)
    held_out = {p.text for p in task.eval_prompts()}
    trained = set(texts(task, range(1000)))
    assert len(held_out) == 50
    assert not held_out & trained
    assert len(trained) > 100


def test_a_task_with_too_few_questions_says_how_many_there_are() -> None:
    params = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    task = open_task(config_of("chain_sum", params=params, eval_size=300), TOKENIZER)
    with pytest.raises(ConfigError, match=r"200 .*eval\.num_prompts .*50"):
        task.eval_prompts()


NONSENSE = ("", "abc", "1", "-1", "9" * 30, "1/0", "[[1]]", "[1, 2]", "{}", '{"a": 1}', "None", "zzz 7 [", "\0")


@pytest.mark.filterwarnings("ignore::UserWarning")  # numpy's, from within a scorer
@pytest.mark.parametrize("nonsense", [NONSENSE[::7], pytest.param(NONSENSE, marks=pytest.mark.nightly)])
def test_every_dataset_gives_any_answer_the_number_of_its_own_scorer(nonsense: tuple[str, ...]) -> None:
    names = sorted(set(DATASETS) - {"composite"})
    assert len(names) > 90
    # one scorer of all, so that one sandbox has all of them loaded
    settings = {"datasets": [DatasetSpec(name, 1.0, {}) for name in names], "seed": 0, "size": 1}
    whole = reasoning_gym.create_dataset("composite", **settings)
    compares = {name: only_compares(name, each) for name, each in whole.datasets.items()}
    scorer = ReasoningGymScorer(
        whole, compares, "composite", settings, is_contained=SANDBOX["kind"] == "bubblewrap"
    )
    for name in names:
        dataset = whole.datasets[name]
        item = dataset[0]
        right = item["answer"]
        question = Question(
            messages=({"role": "user", "content": item["question"]},), ground_truth=right, extra=item["metadata"],
            source=f"reasoning_gym/{name}",
        )  # fmt: skip
        for answer in nonsense:
            try:
                own = float(dataset.score_answer(answer=answer, entry=item))
            except Exception:  # some scorers do not catch what a wrong answer raises
                own = 0.0
            assert scorer.score(question, answer).score == own and 0 <= own <= 1, (name, answer)
        assert right is None or scorer.score(question, right).score == 1, name
        assert scorer.score_apart(question, right) == float(dataset.score_answer(answer=right, entry=item)), name


def composite(*datasets: dict[str, Any]) -> dict[str, Any]:
    return {"name": "composite", "params": {"datasets": list(datasets)}}


def test_a_composite_draws_from_its_datasets_by_weight_and_scores_each_by_its_own() -> None:
    parts = [{"name": "gcd", "weight": 3, "config": {"max_numbers": 2}}, {"name": "spell_backward"}]
    task = open_task(config_of(**composite(*parts)), TOKENIZER)
    questions = [task.prompt(i).question for i in range(100)]
    drawn = Counter(question.extra["source_dataset"] for question in questions)
    assert set(drawn) == {"gcd", "spell_backward"} and drawn["gcd"] > drawn["spell_backward"]
    assert {task.verify(question, question.ground_truth) for question in questions} == {1.0}
    assert {question.source for question in questions} == {"reasoning_gym/spell_backward", "reasoning_gym/gcd"}


@pytest.mark.parametrize("name", [
    "spell_backward", "gcd",
    pytest.param("number_sorting", marks=pytest.mark.processes),
])  # fmt: skip
def test_a_task_verifies_its_reference_answer_with_1_and_nonsense_with_less(name: str) -> None:
    task = open_task(config_of(name, size=5, sandbox=SANDBOX), TOKENIZER)
    for prompt in map(task.prompt, range(5)):
        question = prompt.question
        assert task.verify(question, question.ground_truth) == 1
        assert task.verify(question, f" {question.ground_truth}\n") == 1
        assert task.verify(question, f"<answer> 0 </answer>, no: <answer>{question.ground_truth}</answer>.") == 1
        named = f"<think>I write it in <answer> tags.</think>\n<answer>\n{question.ground_truth}</answer>"
        assert task.verify(question, named) == 1
        assert task.verify(question, "zzz") < 1


@pytest.mark.parametrize(("task", "named"), [
    ({"name": "spell_backwards"}, "'spell_backwards'"), ({"name": "chain_sum", "params": {"seed": 3}}, r"run\.seed"),
    ({"name": "chain_sum", "params": {"max_term": 3}}, "'max_term'"),
    ({"name": "chain_sum", "params": {"min_terms": 5, "max_terms": 2}}, "max_terms"),
    ({"name": "composite"}, r"task\.params\.datasets "), (composite({"weight": 2}), r"task\.params\.datasets "),
    (composite({"name": "gdc"}), "'gdc'"), (composite({"name": "gcd", "config": {"seed": 1}}), r"run\.seed"),
    (composite({"name": "composite"}), "composite"),
])  # fmt: skip
def test_a_wrong_name_or_parameter_is_refused_by_name(task: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        open_task(config_of(**task), TOKENIZER)


def test_long_prompts_are_replaced_and_counted() -> None:
    # The question has 49 characters before the word, the template adds <sep>: 55 tokens fit up to 5 letters.
    task = open_task(config_of(max_prompt_tokens=55), TOKENIZER)
    prompts = [task.prompt(i) for i in range(100)]
    assert max(len(p.tokens) for p in prompts) == 55
    assert task.skipped_long > 100  # most words have 6 to 10 letters
    assert max(len(p.tokens) for p in task.eval_prompts()) <= 55


def test_a_prompt_has_one_date_every_day_or_that_of_the_templates_settings() -> None:
    tokenizer = tokenizer_of("llama3_2")
    assert "Today Date: 26 Jul 2024\n" in open_task(config_of(), tokenizer).prompt(0).text
    dated = config_of(chat_template_kwargs={"date_string": "1 Jan 2000"})
    assert "Today Date: 1 Jan 2000\n" in open_task(dated, tokenizer).prompt(0).text


def test_sft_pairs_are_the_training_prompts_with_their_answers_and_the_eos_token() -> None:
    task = open_task(config_of(), TOKENIZER)
    for i, (prompt, answer) in enumerate(task.sft_pairs(5)):
        assert np.array_equal(prompt.tokens, task.prompt(i).tokens) and prompt.messages == prompt.question.messages
        assert answer[-1] == TOKENIZER.eos_token_id
        assert TOKENIZER.decode(answer[:-1]) == task.prompt(i).question.ground_truth
