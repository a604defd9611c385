"""The task of smollm2_cpu.yaml: list exactly n things as a JSON array, after two worked turns.

The reward looks at the form alone: nothing but a JSON array of texts, n of them, all different and none from the worked
turns. Whether they are things of the kind that is asked for is not looked at.
"""

from __future__ import annotations

import json
from typing import Any

from async_rl.base.config import Config
from rollout_server.question import Question
from rollout_server.rewards.contract import RewardResult
from rollout_server.tasks.base import Task

WORKED = (("colors", ["red", "green", "blue"]), ("farm animals", ["cow", "pig"]))
KINDS = (
    "fruits", "vegetables", "trees", "flowers", "birds", "fish", "insects", "wild animals", "pets", "rivers", "lakes",
    "mountains", "islands", "oceans", "deserts", "countries in Europe", "countries in Africa", "countries in Asia",
    "capital cities", "cities in Italy", "cities in Japan", "cities in Brazil", "languages", "planets", "metals",
    "gases", "chemical elements", "gemstones", "rocks", "board games", "card games", "ball games", "winter sports",
    "dances", "musical instruments", "kinds of music", "composers", "painters", "poets", "scientists", "machines",
    "inventions", "tools", "kitchen tools", "pieces of furniture", "rooms of a house", "kinds of cloth", "clothes",
    "shoes", "hats", "jewels", "vehicles", "ships", "parts of a car", "parts of a computer", "programming languages",
    "professions", "school subjects", "body parts", "bones", "diseases", "vitamins", "spices", "herbs", "nuts",
    "cheeses", "breads", "cakes", "drinks", "teas", "soups", "sauces", "first names", "months", "days of the week",
    "seasons", "feelings", "virtues", "hobbies", "toys", "holidays", "myths", "fairy tales", "buildings", "bridges",
    "museums", "materials",
)  # fmt: skip
COUNTS = (2, 3, 4, 5)
HELD_OUT_EVERY = 4
STRIDE = 101
"""A prime by which questions are taken in turn, so that neighbours differ."""


class JsonLists(Task):
    """Questions for lists of things; every fourth kind of thing is held out."""

    def __init__(self, config: Config, tokenizer: Any) -> None:
        super().__init__(config, tokenizer)
        held_out = KINDS[::HELD_OUT_EVERY]
        self._held_out = mixed([(count, kind) for kind in held_out for count in COUNTS])
        self._train = mixed([(count, kind) for kind in KINDS if kind not in held_out for count in COUNTS])
        self.num_prompts = len(self._train)

    def train_question(self, position: int) -> Question:
        return question(*self._train[position])

    def eval_questions(self) -> list[Question]:
        return [question(*each) for each in self._held_out[: self.eval_size]]

    def verify(self, question: Question, response: str) -> float:
        score = graded(question, response).score
        assert score is not None
        return score


def mixed(pairs: list[tuple[int, str]]) -> list[tuple[int, str]]:
    """Return the questions in an order in which neighbours differ."""
    return [pairs[number * STRIDE % len(pairs)] for number in range(len(pairs))]


def question(count: int, kind: str) -> Question:
    """Return the question for so many things of a kind, after the worked turns."""
    messages = []
    for worked, things in WORKED:
        messages += [
            {"role": "user", "content": asked(len(things), worked)},
            {"role": "assistant", "content": json.dumps(things)},
        ]
    messages.append({"role": "user", "content": asked(count, kind)})
    return Question(messages=tuple(messages), ground_truth=str(count), source="json_lists")


def asked(count: int, kind: str) -> str:
    return f"List exactly {count} {kind} as a JSON array of strings. Answer with the array only."


def graded(question: Question, response: str) -> RewardResult:
    """Return the reward of an answer, 0 to 1, and its parts as metrics.

        0.1 bracketed + 0.3 json + json * (0.3 max(0, 1 - |texts - n| / n) + 0.3 distinct / texts)

    It is 1 for exactly n different texts in a JSON array with nothing around it.
    """
    text, wanted = response.strip(), int(question.ground_truth)
    texts = array_of_texts(text)
    known = {thing for _, things in WORKED for thing in things}
    distinct = len({each.strip().lower() for each in texts} - known - {""})
    count = max(0.0, 1 - abs(len(texts) - wanted) / wanted) if texts else 0.0
    parts = {
        "bracketed": float(text.startswith("[") and text.endswith("]")), "json": float(bool(texts)), "count": count,
        "distinct": distinct / len(texts) if texts else 0.0,
    }  # fmt: skip
    weights = {"bracketed": 0.1, "json": 0.3, "count": 0.3, "distinct": 0.3}
    return RewardResult(sum(weight * parts[name] for name, weight in weights.items()), parts)


def array_of_texts(text: str) -> list[str]:
    """Return the texts of a JSON array that holds nothing else; [] if `text` is none."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return []
    is_array = isinstance(found, list) and all(isinstance(each, str) for each in found)
    return found if is_array else []
