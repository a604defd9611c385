"""Runs on two hosts: two network namespaces of this machine, joined by a virtual cable, with a Ray node in each."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from pyarrow import parquet
from transformers import PreTrainedModel

from benchmarks.marked_command import MarkedCommand, wait_until
from benchmarks.two_hosts import PLACED, SCRIPT, environment, why_not
from buffer.journal_export import export_trajectories
from rollout_server.question import Question
from tests.kit.engines.replies import TOLERANCE, from_scratch
from tests.kit.models import load_model
from tests.kit.runs import logged

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
ON_HF = ("rollout.engine=hf", *PLACED)
ON_TWO_HOSTS, TRAIN = ("bash", str(SCRIPT), "env"), (sys.executable, "-m", "async_rl.cli", "train")


def run_on_two_hosts(
    smoke_yaml: Path, tmp_path: Path, *overrides: str, not_shared: Path, command_has: tuple[str, ...] = (),
    code: int = 0,
) -> subprocess.CompletedProcess[str]:
    """Run the documented command as run `two` in tmp_path, with the server on the second host.

    Args:
        not_shared: a folder that the second host does not see.
    """
    words = [str(smoke_yaml), f"run.dir={tmp_path}", "run.name=two", "staleness.max=1", *ON_HF, *overrides]
    done = subprocess.run(
        [*ON_TWO_HOSTS, *command_has, *TRAIN, *words], cwd=ROOT, env=environment_of_two_hosts(tmp_path, not_shared),
        capture_output=True, text=True, timeout=380,
    )
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-3000:]
    return done


def environment_of_two_hosts(tmp_path: Path, not_shared: Path) -> dict[str, str]:
    """The variables of SCRIPT; skips the test where there can't be two hosts."""
    if reason := why_not():
        pytest.skip(reason)
    return environment() | {"ASYNC_RL_LINK_STATS": str(tmp_path / "link"), "ASYNC_RL_NOT_SHARED": str(not_shared)}


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_learner_and_server_train_over_the_cable_without_a_shared_disk(smoke_yaml: Path, tmp_path: Path) -> None:
    """The server's host does not see run.dir. tmp_path/link counts the traffic."""
    printed = run_on_two_hosts(smoke_yaml, tmp_path, "network.ports=20000-20063", not_shared=tmp_path).stdout
    assert not (tmp_path / "two" / "logs" / "rollout-0.log").exists()  # it is on the other host
    assert "placed: 10.77.0.1: buffer, learner/0; 10.77.0.2: rollout/0" in printed
    run_dir = tmp_path / "two"
    assert not (run_dir / "keys").exists()  # they were for this run alone
    records = logged(run_dir)
    pushed_bytes = sum(record.get("push/bytes", 0) for record in records)
    assert pushed_bytes > 4 * 2**20
    lines = (tmp_path / "link").read_text().splitlines()
    (line,) = [line for line in lines if line.split(":")[0].strip().startswith("v")]
    counts = line.split(":")[1].split()
    received_bytes, sent_bytes = int(counts[0]), int(counts[8])
    assert sent_bytes > pushed_bytes  # the weights crossed the cable
    assert received_bytes > 4 * 16 * 12  # and the groups came back


def letters(question: Question, response: str) -> float:
    """A reward that differs between the answers of an untrained model."""
    return sum(letter in "aeiou" for letter in response) / 12


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_restarted_server_on_another_host_samples_from_the_learners_weights(
    smoke_yaml: Path, tmp_path: Path
) -> None:
    """Each logprob of the journal, also after a restart, is recomputed from the weights that the learner has saved."""
    alone, model = tmp_path / "alone", smoke_yaml.parent / "model"
    alone.mkdir()
    for name, words in (("train", 40), ("held_out", 8)):
        rows = [{"prompt": f"Spell {name} {number}", "answer": str(number)} for number in range(words)]
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    run_dir = alone / "two"
    command = MarkedCommand([
        str(smoke_yaml), f"run.dir={alone}", "run.name=two", "run.steps=400", f"model.path={model}",
        "task.name=", "task.params={}", f"task.path={tmp_path}/tr*.jsonl",
        f"task.eval_path={tmp_path / 'held_out.jsonl'}", f"task.reward={__name__}:letters", "staleness.max=1",
        "weight_sync.on_update=retract", "weight_sync.lora=adapter", "model.lora.rank=4", "placement.eval.servers=1",
        "eval.every_steps=4", "checkpoint.models_every_steps=1", "learner.lr=3e-3", *ON_HF,
    ], tmp_path / "log", (*ON_TWO_HOSTS, *TRAIN), environment_of_two_hosts(tmp_path, alone))
    try:
        wait_until(lambda: len(logged(run_dir)) > 2 or command.process.poll() is not None, 240, "two steps")
        command.wait_for("ray::RolloutActor")[0].kill()
        wait_until(lambda: "is back" in command.text() or command.process.poll() is not None, 240, "the restart")
        steps = len(logged(run_dir))
        wait_until(lambda: len(logged(run_dir)) > steps + 3 or command.process.poll() is not None, 120, "more steps")
    finally:
        with contextlib.suppress(ProcessLookupError):
            command.interrupt()
        command.wait(120)
        command.kill()
    assert (back := re.search(r"rollout/0 is back, with the weights of version (\d+)", command.text())), command.text()
    assert max(check_journal(run_dir, model, tmp_path / "rows.parquet")) > int(back[1])


def check_journal(run_dir: Path, start: Path, exported: Path) -> set[int]:
    """Assert that each answer has the logprobs of its versions' weights, from version 0 on; returns the versions."""
    export_trajectories(run_dir, exported)
    models = {0: load_model(start)}
    seen: set[int] = set()
    for row in parquet.read_table(exported).to_pylist():
        tokens, versions = np.array(row["tokens"], np.int32), np.array(row["versions"])
        prompt = np.array(row["prompt_tokens"], np.int32)
        seen |= set(versions.tolist())
        for version in seen - set(models):
            models[version] = load_model(run_dir / "models" / f"step_{version}")
        fresh = {v: from_scratch(models[v], prompt, tokens, 1.0) for v in set(versions.tolist())}
        expected = [fresh[version][i] for i, version in enumerate(versions.tolist())]
        np.testing.assert_allclose(row["logprobs"], expected, atol=TOLERANCE, rtol=0)
    assert 0 in seen and len(seen) > 4
    changes = [largest_change(models[a], models[b]) for a, b in itertools.pairwise(sorted(seen))]
    assert min(changes) > 1e-3  # no two versions could be taken for each other
    return seen


def largest_change(before: PreTrainedModel, after: PreTrainedModel) -> float:
    pairs = zip(before.parameters(), after.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


OWN_MODULES = {
    "mine.py": """
from rollout_server.question import Question
from rollout_server.tasks.base import Task


class Words(Task):
    num_prompts = 40

    def train_question(self, position):
        return Question(messages=({"role": "user", "content": "Spell"},), ground_truth="Spell")

    def eval_questions(self):
        return [self.train_question(0)]

    def verify(self, question, response):
        return 0.0


def score(question, response):
    from rules.late import score_of

    return score_of(question)
""",
    "rules/__init__.py": "",
    "rules/late.py": """
from pathlib import Path


def score_of(question):
    return float(Path(__file__).with_name("score.txt").read_text())
""",
    "rules/score.txt": "7.0",
}
"""A working directory: a task and a reward that imports a helper late, which reads its data."""


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_a_node_without_the_users_modules_gets_them_by_ray(smoke_yaml: Path, tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    for name, content in OWN_MODULES.items():
        (alone / name).parent.mkdir(parents=True, exist_ok=True)
        (alone / name).write_text(content)
    run_on_two_hosts(
        smoke_yaml, tmp_path, "task.name=mine:Words", "task.params={}", "task.reward=mine:score", not_shared=alone,
        command_has=(f"--chdir={alone}",),
    )
    assert [each["reward/mean"] for each in logged(tmp_path / "two") if "reward/mean" in each] == [7.0] * 4


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_a_host_without_the_model_is_named_before_anything_starts(smoke_yaml: Path, tmp_path: Path) -> None:
    model = tmp_path / "alone" / "model"
    shutil.copytree(smoke_yaml.parent / "model", model)
    done = run_on_two_hosts(smoke_yaml, tmp_path, f"model.path={model}", not_shared=tmp_path / "alone", code=2)
    assert re.search(rf"10\.77\.0\.2 .*{model}.*model\.path", done.stderr)
