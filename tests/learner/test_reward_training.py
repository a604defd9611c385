"""The training of a reward model against plain transformers, and the folder that it writes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
)

from async_rl.base.config import Config, RewardModelConfig
from async_rl.base.errors import AsyncRLError, ConfigError
from async_rl.base.messages.reports import StepDone
from learner.loop.ranks import Ranks
from learner.models.reward_model import RewardModel, RewardRow, RewardRows, Scorer
from learner.models.tiny_model import character_tokenizer
from learner.stages.reward_training import (
    Comparison,
    RewardData,
    lr_factor,
    score_rows,
    train_reward_model,
)
from tests.kit.configs import make_config
from tests.kit.groups import batch_of, make_group, make_row
from tests.kit.models import save_bare_reward_model, save_tiny_model

pytestmark = pytest.mark.processes  # together they compute for long

TOKENIZER = character_tokenizer()
CPU = torch.device("cpu")


def tokens(text: str) -> list[int]:
    found: list[int] = TOKENIZER(text)["input_ids"]
    return found


def letters() -> list[Comparison]:
    """Answers with more of the letter of the prompt are better, whatever their length."""
    made = []
    for number in range(24):
        letter, other = "ab"[number % 2], "ba"[number % 2]
        best, middle, worst = letter * 3, letter + other * (number % 3 + 1), other * (number % 4 + 1)
        rows = [RewardRow(tokens(f"{letter}<sep>{answer}<eos>")) for answer in (best, middle, worst)]
        pairs = [(0, 1, 0.0), (0, 2, 0.0), (1, 2, 0.0)] if number % 3 else [(0, 2, 0.25)]
        made.append(Comparison(rows, pairs))
    return made


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    save_tiny_model("tiny-qwen2", folder, seed=0)
    return folder


def config_of(model: Path, max_tokens: int = 4096, **training: Any) -> Config:
    return make_config(
        model, learner={"max_tokens_per_microbatch": max_tokens},
        task={"max_prompt_tokens": 16}, rollout={"max_response_tokens": 16},
        reward_training={"epochs": 2, "batch_size": 5, "lr": 1e-3, **training},
    )


def values(report: StepDone) -> dict[str, float]:
    return {metric.key: metric.value for metric in report.metrics}


def plainly_trained(base: Path, config: Config, data: list[Comparison]) -> Any:
    """A loop over transformers: one row at a time, no padding, and the loss of each pair written out."""
    training = config.reward_training
    lm = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(config.run.seed)
    lm.score.weight.data = torch.randn(lm.score.weight.shape, generator=generator) / math.sqrt(97)
    lm.config.pad_token_id = None  # so that the last token is read, whatever its id
    optimizer = torch.optim.AdamW(lm.parameters(), lr=training.lr, weight_decay=0.0)
    order = torch.Generator().manual_seed(config.run.seed)
    steps, done = training.epochs * math.ceil(len(data) / training.batch_size), 0
    for _ in range(training.epochs):
        for indices in torch.randperm(len(data), generator=order).split(training.batch_size):
            loss = torch.zeros(())
            for each in (data[int(i)] for i in indices):
                scores = [lm(torch.tensor([row.tokens])).logits[0, 0] for row in each.rows]
                for i, j, margin in each.pairs:
                    of_pair = -F.logsigmoid(scores[i] - scores[j] - margin)
                    of_pair = of_pair + training.centering * (scores[i] + scores[j]) ** 2
                    loss = loss + of_pair / len(each.pairs) / len(indices)
            for group in optimizer.param_groups:
                group["lr"] = training.lr * lr_factor(done, steps)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(lm.parameters(), 1.0)
            optimizer.step()
            done += 1
    return lm


@pytest.mark.parametrize(("max_tokens", "centering"), [(4096, 0.0), (64, 0.1)])
def test_training_is_that_of_a_plain_loop_over_transformers(
    base: Path, tmp_path: Path, max_tokens: int, centering: float
) -> None:
    config, data = config_of(base, max_tokens, centering=centering), letters()
    *_, last = train_reward_model(config, RewardData(data, data, []), tmp_path / "rm")
    assert last.version == 10 and values(last)["reward_model/held_out_accuracy"] > 0.6
    lm = plainly_trained(base, config, data)
    ours = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm", dtype=torch.float32)
    rows = [row.tokens for each in data for row in each.rows]
    with torch.no_grad():
        expected = [lm(torch.tensor([row])).logits.item() for row in rows]
        found = [ours(torch.tensor([row])).logits.item() for row in rows]
    assert found == pytest.approx(expected, abs=2e-3)
    right = [expected[3 * n] > expected[3 * n + 2] for n in range(len(data))]
    assert sum(right) > 12


@pytest.mark.parametrize("zero_at", ["some", "none"])
def test_the_folder_scores_the_same_here_and_in_transformers(
    base: Path, tmp_path: Path, one_rank: None, zero_at: str
) -> None:
    rows = [row for each in letters() for row in each.rows]
    zero = rows[:7] if zero_at == "some" else []
    list(train_reward_model(config_of(base), RewardData(letters(), [], zero), tmp_path / "rm"))
    assert load_file(tmp_path / "rm" / "model.safetensors")["score.bias"].tolist() == [0.0]
    lm = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm", dtype=torch.float32)
    with torch.no_grad():
        outputs = [lm(torch.tensor([row.tokens])).logits.item() for row in rows]
    config = make_config(
        base, task={"max_prompt_tokens": 64}, rollout={"group_size": 3, "max_response_tokens": 64},
        reward_model=RewardModelConfig(path=str(tmp_path / "rm")),
    )  # fmt: skip
    scorer = RewardModel(config, CPU, torch.float32, Ranks(init_device_mesh("cpu", (1,))))
    groups = [
        make_group(number, rows[0][:2], [make_row(row[2:], [-1.0] * (len(row) - 2), 0.0) for row in rows])
        for number, rows in enumerate([row.tokens for row in each.rows] for each in letters())
    ]
    scored = scorer.score(batch_of(*groups))
    rewards = [row.reward for group in scored.groups for row in group.rows]
    offset = sum(outputs[:7]) / 7 if zero else 0.0
    assert lm.config.reward_offset == pytest.approx(offset, abs=1e-5)
    assert rewards == pytest.approx([output - offset for output in outputs], abs=1e-5)
    assert not zero or sum(rewards[:7]) == pytest.approx(0, abs=1e-4)


@pytest.mark.parametrize("pad", [None, 2])
def test_transformers_reads_the_last_token_of_padded_rows_too(base: Path, tmp_path: Path, pad: int | None) -> None:
    """A base without padding, or with the eos token for it, would be read one token early, or not in batches."""
    lm = AutoModelForCausalLM.from_pretrained(base)
    lm.config.pad_token_id = pad
    assert lm.config.eos_token_id == 2
    lm.save_pretrained(tmp_path / "base")
    TOKENIZER.save_pretrained(tmp_path / "base")
    list(train_reward_model(config_of(tmp_path / "base", epochs=1), RewardData(letters(), [], []), tmp_path / "rm"))
    scorer = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm", dtype=torch.float32)
    padding = scorer.config.pad_token_id
    assert padding not in (None, 2)
    short, long = tokens("a<sep>a<eos>"), tokens("a<sep>abab<eos>")
    padded = torch.tensor([[*short, *[padding] * (len(long) - len(short))], long])
    alone = [scorer(torch.tensor([row])).logits.item() for row in (short, long)]
    assert scorer(padded).logits[:, 0].tolist() == pytest.approx(alone, abs=1e-5)


@pytest.mark.parametrize("same_vocabulary", [True, False])
def test_training_reads_the_rows_that_scoring_reads(
    base: Path, tmp_path: Path, one_rank: None, same_vocabulary: bool
) -> None:
    own = character_tokenizer()
    if not same_vocabulary:
        own.add_tokens(["ab"])
        own.chat_template = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }};{% endfor %}"
    save_bare_reward_model(tmp_path / "rm", vocab=len(own), pad_token_id=0)
    own.save_pretrained(tmp_path / "rm")
    messages, prompt, answer = ({"role": "user", "content": "hi"},), tokens("hi<sep>"), tokens("abba<eos>")
    config = make_config(
        base, task={"max_prompt_tokens": 64}, reward_model=RewardModelConfig(path=str(tmp_path / "rm"))
    )
    group = make_group(0, prompt, [make_row(answer, [-1.0] * len(answer), 0.0)], messages=messages)
    trained = RewardRows(str(base), str(tmp_path / "rm")).row(messages, prompt, answer)
    texts = "hi<sep>abba<eos>" if same_vocabulary else "[user] hi;[assistant] abba;"
    assert AutoTokenizer.from_pretrained(tmp_path / "rm").decode(trained.tokens) == texts
    scorer = RewardModel(config, CPU, torch.float32, Ranks(init_device_mesh("cpu", (1,))))
    lm = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm", dtype=torch.float32)
    (row,) = scorer.score(batch_of(group)).groups[0].rows
    assert row.reward == pytest.approx(lm(torch.tensor([trained.tokens])).logits.item(), rel=1e-5)


def test_training_gives_an_encoder_the_segments_of_its_rows() -> None:
    torch.manual_seed(4)
    lm = BertForSequenceClassification(BertConfig(
        vocab_size=9, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_labels=1,
        initializer_range=0.5,
    )).eval()  # fmt: skip
    rows = [RewardRow([1, 5, 6, 2, 7], [0, 0, 0, 1, 1]), RewardRow([3, 4])]
    expected = [lm(torch.tensor([[1, 5, 6, 2, 7]]), token_type_ids=torch.tensor([[0, 0, 0, 1, 1]])).logits.item()]
    expected.append(lm(torch.tensor([[3, 4]])).logits.item())
    assert score_rows(Scorer(lm, torch.float32), rows).tolist() == pytest.approx(expected, rel=1e-5)
    assert lm(torch.tensor([[1, 5, 6, 2, 7]])).logits.item() != pytest.approx(expected[0], abs=1e-3)


def save_encoder(folder: Path) -> Path:
    """Save a BERT with a head for rewards."""
    torch.manual_seed(4)
    BertForSequenceClassification(BertConfig(
        vocab_size=len(TOKENIZER), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_labels=1,
    )).save_pretrained(folder)  # fmt: skip
    TOKENIZER.save_pretrained(folder)
    return folder


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_an_encoder_is_trained_on_a_gpu(tmp_path: Path) -> None:
    data = RewardData(letters(), letters(), [])
    *_, last = train_reward_model(config_of(save_encoder(tmp_path / "base")), data, tmp_path / "rm")
    assert last.version == 10 and math.isfinite(values(last)["reward_model/held_out_loss"])


def test_a_reward_model_can_be_trained_further_and_one_of_more_labels_is_refused(base: Path, tmp_path: Path) -> None:
    data = RewardData(letters(), letters(), [])
    list(train_reward_model(config_of(base, epochs=8, lr=2e-3), data, tmp_path / "first"))
    first = AutoModelForSequenceClassification.from_pretrained(tmp_path / "first", dtype=torch.float32)
    config = config_of(base, epochs=1, lr=1e-9, base=str(tmp_path / "first"))
    list(train_reward_model(config, data, tmp_path / "second"))
    second = AutoModelForSequenceClassification.from_pretrained(tmp_path / "second", dtype=torch.float32)
    torch.testing.assert_close(second.score.weight, first.score.weight, atol=1e-6, rtol=0)
    save_bare_reward_model(tmp_path / "three", num_labels=3)
    with pytest.raises(ConfigError, match=r"^reward_training\.base .*got 3"):
        next(train_reward_model(config_of(base, base=str(tmp_path / "three")), data, tmp_path / "x"))


def test_what_can_not_be_trained_is_refused(base: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="got none"):
        next(train_reward_model(config_of(base), RewardData([], [], []), tmp_path))
    long = Comparison([RewardRow([5] * 1025), RewardRow([6])], [(0, 1, 0.0)])
    with pytest.raises(ConfigError, match=r"1025 tokens.* 1024 positions"):
        next(train_reward_model(config_of(base), RewardData([long], [], []), tmp_path))
    with pytest.raises(AsyncRLError, match=r"reward_training\.lr"):
        list(train_reward_model(config_of(base, lr=1e20), RewardData(letters(), [], []), tmp_path / "out"))
    assert not (tmp_path / "out").exists()
