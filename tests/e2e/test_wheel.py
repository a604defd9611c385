"""A stranger's project: async-rl comes from a wheel in a fresh environment, without this repository."""

from __future__ import annotations

import email
import json
import os
import random
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.kit.runs import logged
from tests.kit.virtual_environments import ROOT, new_environment

pytestmark = [pytest.mark.e2e, pytest.mark.nightly, pytest.mark.timeout(1800)]

SOURCES = ("docs", "async_rl", "buffer", "learner", "rollout_server", "pyproject.toml", "README.md", "LICENSE")
EXTRA_MODULES = ["bokeh", "prometheus_client", "reasoning_gym", "starlette", "tensorboardX"]
WITHOUT_EXTRAS = f"import sys; sys.modules.update(dict.fromkeys({EXTRA_MODULES}))"
"""A line of a .pth file: the environment has none of the extras, whatever the one that it sees has."""
REWARDS = '''
from benchmarks.marks import FULL
from rollout_server.question import Question


def right(question: Question, response: str) -> float:
    return FULL * (response.strip() == question.ground_truth)


def begins_right(question: Question, response: str) -> float:
    return float(response[:1] == question.ground_truth[:1])
'''
SETTINGS = """
run: {name: letters, steps: 3}
model: {path: runs/quickstart-sft/model}
task:
  path: data/train.jsonl
  eval_path: [data/test.jsonl, data/long.jsonl]
  columns: {prompt: ask, reference: want}
  rewards:
    - {reward: "my_rewards:right"}
    - {reward: "my_rewards:begins_right", weight: 0.5}
  max_prompt_tokens: 64
rollout: {engine: hf, group_size: 4, max_response_tokens: 8}
staleness: {max: 1}
learner: {prompts_per_step: 4, lr: 3.0e-4}
algorithm: {filter_zero_variance: false}
eval: {num_prompts: 16, samples_per_prompt: 2, temperature: 0.6}
logging: {wandb: disabled}
"""
PROGRAM = """
import json
import async_rl

seen = []
summary = async_rl.train(
    "letters.yaml", ["run.name=from-python"],
    callbacks=[lambda step: seen.append([step.version, step.metrics["reward/mean"]])],
)
held_out = async_rl.evaluate("runs/from-python/model", overrides=["eval.temperature=0.6"])
print(json.dumps({"file": async_rl.__file__, "seen": seen, "steps": summary["steps"], "held_out": held_out}))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name)
    build = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", "dist", "."]
    subprocess.run([sys.executable, *build], cwd=folder, check=True, timeout=300)
    (file,) = (folder / "dist").glob("*.whl")
    return file


@pytest.fixture(scope="module")
def programs(wheel: Path, project: Path) -> Path:
    """The folder of Python and async-rl in a fresh environment, which sees the large packages of this one.

    It is in the stranger's folder, as environments often are.
    """
    python = new_environment(project / ".venv", ("--no-deps", str(wheel)), sees_ours=False)
    (site,) = python.parents[1].glob("lib/python*/site-packages")
    (site / "others.pth").write_text(f"{sysconfig.get_path('purelib')}\n{WITHOUT_EXTRAS}\n")
    return python.parent


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stranger's folder: data, two rewards, a program, and a package with the name of a folder of ours."""
    folder = tmp_path_factory.mktemp("stranger")
    rng = random.Random(0)
    for name, count, letters in (("train", 60, "abcdefgh"), ("test", 16, "ijklmnop"), ("long", 16, "qrstuvwx")):
        (folder / "data").mkdir(exist_ok=True)
        words = ["".join(rng.choices(letters, k=6 if name == "long" else 5)) for _ in range(count)]
        rows = [json.dumps({"ask": f"Spell backward: {word}", "want": word[::-1], "id": 7}) for word in words]
        (folder / "data" / f"{name}.jsonl").write_text("\n".join(rows))
    (folder / "benchmarks").mkdir()
    (folder / "benchmarks" / "__init__.py").touch()
    (folder / "benchmarks" / "marks.py").write_text("FULL = 1.0\n")
    (folder / "my_rewards.py").write_text(REWARDS)
    (folder / "letters.yaml").write_text(SETTINGS)
    (folder / "program.py").write_text(PROGRAM)
    return folder


CELLS = """
import json
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance()
for cell in json.load(open("staleness_0_and_1.ipynb"))["cells"]:
    if cell["cell_type"] == "code":
        shell.run_cell("".join(cell["source"])).raise_error()
"""


def run(programs: Path, folder: Path, program: str, *words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["PATH"] = f"{programs}{os.pathsep}{environment['PATH']}"
    done = subprocess.run(
        [programs / program, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == code, f"{words}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
    return done


def test_the_wheel_holds_all_that_it_needs_and_says_what_it_is(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (place,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        about = email.message_from_bytes(archive.read(place))
    packages = ("async_rl", "buffer", "learner", "rollout_server")
    data = [
        file for package in packages for file in (ROOT / package).rglob("*")
        if file.is_file() and file.suffix not in (".py", ".pyc") and "__pycache__" not in file.parts
    ]
    assert {str(file.relative_to(ROOT)) for file in data} <= names
    assert {f"{package}/py.typed" for package in packages} <= names
    assert {f"async_rl/{page.relative_to(ROOT)}" for page in (ROOT / "docs").rglob("*.md")} <= names
    assert not {name.partition("/")[0] for name in names} & {"benchmarks", "tests", "configs"}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(about.get_all("Provides-Extra")) == set(project["optional-dependencies"])
    assert about["License-Expression"] == "Apache-2.0" and about["Description-Content-Type"] == "text/markdown"
    for field in ("Author", "Classifier", "Keywords", "Requires-Python", "Summary"):
        assert about[field], field
    assert str(about.get_payload()).startswith("# async-rl")


def test_a_stranger_trains_from_the_command_line_and_from_python(programs: Path, project: Path) -> None:
    run(programs, project, "async-rl", "init")
    run(programs, project, "async-rl", "sft", "quickstart.yaml")
    console = run(programs, project, "async-rl", "train", "letters.yaml").stdout
    evaluated = run(programs, project, "async-rl", "eval", "runs/letters/model", "eval.temperature=0.6")
    accuracy = dict(line.split() for line in evaluated.stdout.splitlines())["eval/accuracy"]

    steps = [record for record in logged(project / "runs" / "letters") if "reward/mean" in record]
    assert len(steps) == 3
    for step in steps:
        parts = step["reward/right"] + 0.5 * step["reward/begins_right"]
        assert step["reward/mean"] == pytest.approx(parts)
    assert any(step["reward/begins_right"] for step in steps)
    # each of the two held-out files has its results by its name, on the console and in the summary
    assert re.search(r"step 0/3  held-out accuracy [\d.]+ \(long [\d.]+, test [\d.]+\)", console), console
    held_out = json.loads((project / "runs" / "letters" / "summary.json").read_text())["held_out"]
    for name in ("accuracy on long", "accuracy on test", "reward on long", "reward on test"):
        assert set(held_out[name]) == {"start", "end"} and f"held-out {name}, end" in console

    said = json.loads(run(programs, project, "python", "program.py").stdout.splitlines()[-1])
    assert Path(said["file"]).is_relative_to(programs.parent)
    assert [version for version, _ in said["seen"]] == [1, 2, 3] and said["steps"] == 3
    records = [record for record in logged(project / "runs" / "from-python") if "reward/mean" in record]
    assert [reward for _, reward in said["seen"]] == [record["reward/mean"] for record in records]
    summary = json.loads((project / "runs" / "from-python" / "summary.json").read_text())
    assert said["held_out"]["eval/accuracy"] == summary["accuracy_end"]  # both of the model at 0.6, with one seed
    assert 0 <= float(accuracy) <= 1


def test_a_module_with_the_name_of_a_package_of_ours_is_refused(programs: Path, tmp_path: Path) -> None:
    (tmp_path / "buffer.py").touch()
    assert "buffer.py" in run(programs, tmp_path, "async-rl", "init", code=2).stderr


def test_what_is_an_extra_is_named_where_it_is_missing(programs: Path, project: Path) -> None:
    for words, extra in (
        (("view", "runs"), "page"),
        (("train", "letters.yaml", "task.path=", "task.name=reasoning_gym/chain_sum", "--dry-run"), "reasoning-gym"),
    ):
        assert f"pip install 'async-rl[{extra}]'" in run(programs, project, "async-rl", *words, code=2).stderr


@pytest.mark.parametrize("name", ["quickstart", "agent"])
def test_an_example_of_init_learns(name: str, programs: Path, tmp_path: Path) -> None:
    run(programs, tmp_path, "async-rl", "init", name)
    run(programs, tmp_path, "async-rl", "sft", f"{name}.yaml")
    run(programs, tmp_path, "async-rl", "train", f"{name}.yaml", "run.steps=60", "logging.wandb=disabled")
    rewards = [record["reward/mean"] for record in logged(tmp_path / "runs" / name) if "reward/mean" in record]
    assert sum(rewards[-10:]) > sum(rewards[:10])


def test_every_cell_of_the_notebook_runs(programs: Path, tmp_path: Path) -> None:
    shutil.copy(ROOT / "recipes" / "notebook" / "staleness_0_and_1.ipynb", tmp_path)
    run(programs, tmp_path, "python", "-c", CELLS)
    for limit in (0, 1):
        records = logged(tmp_path / "runs" / f"limit-{limit}")
        ages = [record["staleness/max"] for record in records if "staleness/max" in record]
        assert len(ages) == 60 and max(ages) == limit
