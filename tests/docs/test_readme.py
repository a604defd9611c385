"""The documents stay true: their commands run, their configs load, the links, keys and metrics in them exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from async_rl.base.config.loading import load_config
from async_rl.base.errors import ConfigError
from async_rl.cli import main
from tests.kit.documents import DOCUMENTS, FILES, ROOT, blocks, run
from tests.kit.models import save_tiny_model
from tests.kit.reference_pages import FOLDER, PAGES

QUICK = [
    "async-rl doctor configs/quickstart.yaml",
    "async-rl train configs/quickstart.yaml --dry-run",
    "async-rl prepare gsm8k train.jsonl data/gsm8k/train.parquet",
    "async-rl prepare gsm8k test.jsonl data/gsm8k/test.parquet",
    "async-rl keys new keys",
    "async-rl plan --staleness 0,1,2,4,8 --train-s 10 --sync-s 0.5 --group-s 8 --cv 1",
    "async-rl plan --train-s 40 --group-s 60 --cv 0.5 --staleness 0,1,2,4,8",
    "async-rl plan --rollout-s 60 --train-s 40",
]
NIGHTLY = [
    "make demo",
    "async-rl certify configs/quickstart.yaml",
    "async-rl train configs/quickstart.yaml staleness.max=0 run.name=sync",
    "async-rl train configs/quickstart.yaml staleness.max=0 run.name=sync run.steps=100",
    "async-rl train configs/quickstart.yaml staleness.max=1 run.name=async run.steps=100",
    "async-rl train configs/quickstart.yaml rollout.engine=hf",
    "async-rl sft configs/agent_cpu.yaml",
    "async-rl train configs/agent_cpu.yaml",
    "async-rl sft configs/guess_cpu.yaml",
    "async-rl train configs/guess_cpu.yaml",
    "python configs/shop/orders.py",
    "async-rl sft configs/shop_agent_cpu.yaml",
    "async-rl train configs/shop_agent_cpu.yaml --dry-run",
    "async-rl train configs/shop_agent_cpu.yaml",
    "async-rl train configs/shop_agent_cpu.yaml rollout.engine=hf",
    "async-rl sft configs/quickstart.yaml sft.base=tiny-qwen3 model.path=runs/qwen3-sft/model",
    "async-rl train configs/quickstart.yaml model.path=runs/qwen3-sft/model rollout.engine=vllm",
    "async-rl train configs/quickstart.yaml model.path=runs/qwen3-sft/model placement.rollout.servers=2 "
    "placement.rollout.engines=[sglang,vllm]",
    "async-rl train configs/quickstart.yaml algorithm.preset=dr_grpo",
    "async-rl train configs/quickstart.yaml algorithm.preset=decoupled_ppo critic.lr=3e-4",
    "async-rl sft configs/quickstart.yaml sft.base=tiny-llama model.path=runs/llama-sft/model",
    "async-rl train configs/quickstart.yaml model.path=runs/llama-sft/model",
    "async-rl sweep configs/quickstart.yaml --staleness 0,4 --seeds 1 --name two-limits run.steps=100 "
    "eval.every_steps=25",
    "async-rl sweep configs/quickstart.yaml --staleness 0,1,2,4 --seeds 3 run.steps=100 eval.every_steps=25",
    "async-rl sft configs/sweep_agent_cpu.yaml",
    "async-rl sweep configs/sweep_agent_cpu.yaml --staleness 1,8,2/8 --seeds 3 --seconds 60 --name depths",
    "async-rl report runs/quickstart-sweep",
    "async-rl report runs/two-limits",
    "async-rl sweep configs/quickstart.yaml --staleness 0,1,2,4 --seeds 3 run.steps=100 eval.every_steps=25 "
    "--parallel auto --dry-run",
    "async-rl plan runs/quickstart-sweep",
    "python -m benchmarks.generation configs/quickstart.yaml --groups 1024 --rounds 3",
    "python -m benchmarks.episodes configs/quickstart.yaml --rounds 3 --hang",
    "python -m benchmarks.learner_step",
    "async-rl export-trajectories runs/quickstart out.parquet",
    "python -m benchmarks.buffer",
]
ELSEWHERE = {
    "async-rl sft configs/code_cpu.yaml": "tests/e2e/test_code_task.py",
    "async-rl train configs/code_cpu.yaml": "tests/e2e/test_code_task.py",
    "async-rl sft configs/rlhf/sft.yaml": "tests/e2e/test_rlhf.py",
    "python configs/rlhf/people.py": "tests/e2e/test_rlhf.py",
    "async-rl reward-model configs/rlhf/reward_model.yaml": "tests/e2e/test_rlhf.py",
    "async-rl train configs/rlhf/ppo.yaml": "tests/e2e/test_rlhf.py",
    "async-rl train --resume runs/quickstart run.steps=500": "tests/e2e/test_resume.py",
    "async-rl train configs/quickstart.yaml --resume auto": "tests/e2e/test_resume.py",
    "async-rl export runs/quickstart runs/quickstart-export": "tests/learner/models/test_export.py",
    "async-rl eval runs/quickstart/model": "tests/rollout_server/test_run_eval.py",
    "async-rl eval runs/quickstart/model eval.temperature=0.6 eval.top_p=0.95 eval.samples_per_prompt=8":
        "tests/rollout_server/test_run_eval.py",
    "async-rl eval runs/quickstart/model eval.temperature=0 eval.samples_per_prompt=1":
        "tests/rollout_server/test_run_eval.py",
    "source .venv/bin/activate": "it is Python's own",
    "async-rl view runs/quickstart": "tests/view/test_browser.py",
    "async-rl view runs": "tests/view/test_command.py",
    "async-rl train configs/quickstart.yaml --view": "tests/view/test_command.py, without the training",
    "bash scripts/chromium.sh": ".ci/run",
    "bash scripts/bubblewrap.sh": ".ci/run",
    "async-rl train mine.yaml --dry-run": "tests/docs/test_own_task.py",
    "async-rl train mine.yaml": "tests/docs/test_own_task.py, with a tiny model",
    "async-rl train orders.yaml --dry-run": "tests/docs/test_episode_pages.py",
    "async-rl train orders.yaml": "tests/docs/test_episode_pages.py, with a tiny model",
    "async-rl sft configs/sweep_cpu.yaml": "benchmarks/results, by hand",
    "async-rl sweep configs/sweep_cpu.yaml --staleness 0,1,2,3,5,8,10 --seeds 3": "benchmarks/results, by hand",
    "async-rl sweep configs/sweep_agent_cpu.yaml --staleness 0,1,2,4,8 --seeds 3": "benchmarks/results, by hand",
    "python -m benchmarks.engines configs/quickstart.yaml --rounds 3 --seconds 20 learner.prompts_per_step=16":
        "benchmarks/results, by hand",
    "python -m benchmarks.exact_routing --engines hf,sglang --tokens 100000 --rounds 2": "benchmarks/results, by hand",
    "async-rl answer runs/my-run go-on": "tests/e2e/test_watcher.py",
    "async-rl answer runs/my-run rollback": "tests/e2e/test_watcher.py",
    "async-rl answer runs/my-run stop": "tests/e2e/test_watcher.py",
    "python -m benchmarks.smollm2 models/SmolLM2-135M-Instruct": "by hand, docs/results/index.md has the result",
    "async-rl train configs/smollm2_cpu.yaml": "by hand, and its dry run in tests/docs/test_recipes.py",
    "make test": "CI runs it",
    "make check": "tests/test_architecture.py",
    "make unit": "a part of make test",
    "make nightly": "it runs this file",
    "make vllm": "a part of make nightly",
    "pip wheel --no-deps --wheel-dir dist .": "tests/e2e/test_wheel.py",
    "pip install 'dist/async_rl-0.2.0-py3-none-any.whl[all]'": "tests/e2e/test_wheel.py, without the extras",
    "async-rl init": "tests/e2e/test_wheel.py",
    "async-rl sft quickstart.yaml": "tests/e2e/test_wheel.py",
    "async-rl train quickstart.yaml": "tests/e2e/test_wheel.py",
    "pip install torch==2.13.0+cpu || pip install torch==2.13.0": "scripts/setup.sh",
    "pip install -c constraints/cpu.txt -e '.[dev,peers,sglang-cpu]'": "scripts/setup.sh",
    "pip install --no-deps apache-tvm-ffi==0.1.15.post2 sglang==0.5.21 xgrammar==0.2.7":
        "scripts/setup.sh, tests/test_constraints.py",
    "pip install -c constraints/cpu.txt --no-deps -r requirements/sglang-cpu-nodeps.txt": "scripts/setup.sh",
    "pip install -c constraints/cuda.txt -e '.[dev,peers,sglang-gpu]'": "scripts/setup.sh",
}
"""Commands that some other place runs."""


def commands(text: str) -> list[str]:
    lines = [
        line.partition("  #")[0].strip() for block in blocks(text, "bash") for line in block.splitlines()
    ]
    return [line for line in lines if line]


def save_checkout(folder: Path) -> Path:
    """Make a folder that looks like a checkout and takes what the commands write."""
    for entry in ROOT.iterdir():
        if entry.name == ".venv-vllm" or (not entry.name.startswith(".") and entry.name not in ("runs", "data")):
            (folder / entry.name).symlink_to(entry)
    for name in ("train", "test"):
        line = '{"question": "1 + 1?", "answer": "It is two.\\n#### 2"}\n'
        (folder / f"{name}.jsonl").write_text(line)
    return folder


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkout(tmp_path_factory.mktemp("checkout"))


@pytest.fixture(scope="module")
def checkout_with_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With an untrained model in the place of the one that `async-rl sft configs/quickstart.yaml` makes."""
    folder = save_checkout(tmp_path_factory.mktemp("checkout"))
    save_tiny_model("tiny-qwen2", folder / "runs" / "quickstart-sft" / "model", seed=0)
    return folder


def test_every_command_in_the_documents_is_covered_and_no_other_is_listed() -> None:
    documented = [command for text in DOCUMENTS.values() for command in commands(text)]
    assert sorted(set(documented)) == sorted([*QUICK, *NIGHTLY, *ELSEWHERE])


@pytest.mark.processes
@pytest.mark.parametrize("command", QUICK)
def test_a_quick_command_runs(command: str, checkout_with_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(checkout_with_model)
    assert main(command.split()[1:]) == 0


SHORTER = {
    "run.steps=100 eval.every_steps=25": "run.steps=25 eval.every_steps=25", "--seeds 3": "--seeds 1",
    "--seconds 60": "--seconds 10",
}
"""What a long command has less of in a test."""


def shortened(command: str) -> str:
    """A long command with fewer steps, seeds and seconds. `make demo` and other tests show that models learn."""
    for whole, short in SHORTER.items():
        command = command.replace(whole, short)
    if command.startswith("async-rl sft"):
        return f"{command} sft.steps=40"
    is_run = command.startswith("async-rl train") and "--dry-run" not in command
    return f"{command} run.steps=25" if is_run else command


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("command", NIGHTLY)
def test_a_long_command_runs(command: str, checkout: Path) -> None:
    if command.startswith("make"):
        run(command, ROOT, timeout_s=3500)
        return
    model = re.search(r"model\.path=(\S+)", command)
    if (
        "async-rl sft" not in command
        and not (checkout / (model[1] if model else "runs/quickstart-sft")).exists()
    ):
        base = f"sft.base=tiny-llama {model[0]}" if model else ""
        run(f"async-rl sft configs/quickstart.yaml {base}", checkout, timeout_s=600)
    run(shortened(command), checkout, timeout_s=2800)


def test_every_config_key_in_the_documents_exists() -> None:
    quickstart = ROOT / "configs" / "quickstart.yaml"
    sections = set(load_config(quickstart).__dataclass_fields__)
    keys = set()
    for name, text in DOCUMENTS.items():
        if name.startswith("docs/how-to/from-"):  # the first columns have the keys of others
            text = re.sub(r"^\|[^|]*\|", "|", text, flags=re.MULTILINE)
        for key in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)(?:[:=][^`]+)?`", text):
            if key.split(".")[0] in sections:
                keys.add(key)
                with pytest.raises(ConfigError) as caught:
                    load_config(quickstart, [f"{key}=[[]]"])  # fits no key, so it is told apart from unknown
                assert "unknown key" not in str(caught.value)
    assert len(keys) > 100


def anchors(text: str) -> set[str]:
    """The names that a link may have after `#`: GitHub's form of each heading."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_link_of_a_document_leads_somewhere() -> None:
    links = [(file, to) for file in FILES for to in re.findall(r"\]\((?!https?:)([^)\s]+)\)", file.read_text())]
    assert len(links) > 50
    for file, target in links:
        name, _, anchor = target.partition("#")
        linked = (file.parent / name).resolve() if name else file
        assert linked.exists(), (file, target)
        assert not anchor or anchor in anchors(linked.read_text()), (file, target)


def test_the_badge_names_the_oldest_python_of_the_package() -> None:
    (shown,) = re.findall(r"badge/python-([\d.]+)\+-", DOCUMENTS["README.md"])
    assert f'requires-python = ">={shown}"' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize("name", PAGES)
def test_a_page_of_the_reference_is_that_of_the_code(name: str) -> None:
    assert (FOLDER / name).read_text() == PAGES[name](), "python -m tests.kit.reference_pages"


def test_the_code_that_contributing_shows_is_that_of_the_extensions() -> None:
    files = [file.read_text() for file in (ROOT / "tests" / "extensions").glob("*.py")]
    shown = blocks(DOCUMENTS["CONTRIBUTING.md"], "python")
    assert shown
    assert [block for block in shown if block not in files] == []


def test_the_reference_loop_in_the_documents_is_the_one_that_runs_are_compared_with() -> None:
    (shown,) = blocks(DOCUMENTS["docs/explanation/reference-loop.md"], "python")
    assert shown == (ROOT / "tests" / "kit" / "reference_loop.py").read_text()
