"""Fixtures of several folders, the rule that unit tests start no process, and the workers of pytest-xdist."""

from __future__ import annotations

import gc
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
import yaml
from xdist.scheduler import LoadFileScheduling

from async_rl.base.host import usable_cores
from benchmarks.marked_command import MarkedCommand

if TYPE_CHECKING:
    from tests.kit.engines.servers import SGLangServer

pytest.register_assert_rewrite("tests.kit")  # before its first import: its asserts show values as a test file's do
# Transformers reads these at its import. They keep its bars and tables of loaded weights out of the tests' output.
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
# Ray's default, 15, would starve the actors of tests on a host with other work. A run sets it too.
os.environ.setdefault("RAY_worker_niceness", "0")
if "PYTEST_XDIST_WORKER" in os.environ:  # one worker a core: more threads would only wait for each other
    os.environ.setdefault("OMP_NUM_THREADS", "1")
hypothesis.settings.register_profile("default", deadline=None)  # a busy host may take long for an example
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)  # new ones are for `make nightly`
hypothesis.settings.load_profile("repeatable")
gc.set_threshold(50_000)  # else the garbage collector takes an eighth of the time of imports
warnings.filterwarnings("ignore", message="builtin type swigvarlink", category=DeprecationWarning)  # at the exit

STARTING = {"subprocess.Popen", "os.fork", "os.posix_spawn"}
"""Audit events of a new process."""
SMALL_PROGRAMS = {"bash", "git", "ldconfig", "nvidia-smi", "uname"}
"""Programs that a unit test may run: they end at once."""
PROCESS_FIXTURES = {"ray_here", "sglang_server", "start", "two_ranks", "vllm_server"}
"""A test that uses one of these is marked `processes` without saying so."""
ON_SGLANG = {
    *(f"tests/e2e/test_{name}.py" for name in ("episode_policies", "forbidden_tokens", "policies", "synchronous")),
    *(f"tests/rollout_server/engines/test_{name}.py" for name in (
        "every_engine", "server_updates", "sglang_server", "staged_updates"
    )),
    "tests/rollout_server/episodes/test_server_parser.py",
}
"""The files whose tests share an SGLang server: a worker of pytest-xdist that gets one of them gets all."""
MAX_WORKERS = 8
"""Each may hold a run with its servers, about 3 GiB."""
NIGHTLY_S = 900
"""The time limit of a nightly test that has none of its own."""
_unit_test: str | None = None
"""The test that runs now, if it must not start a process."""


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return the number of workers for `-n auto`. xdist would count the cores of the host, also those of others."""
    return min(usable_cores(), MAX_WORKERS)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out of `make unit` the files whose every test has one of its other marks: to import them takes seconds."""
    if "not processes" not in config.option.markexpr or collection_path.suffix != ".py":
        return None
    marks = re.search(r"^pytestmark = .*", collection_path.read_text(), re.MULTILINE)
    return True if marks and re.search(r"mark\.(processes|e2e|gpu|nightly)\b", marks[0]) else None


class ByFileAndServer(LoadFileScheduling):
    """Gives a worker whole files, and one worker all files of ON_SGLANG."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return "sglang" if file in ON_SGLANG else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    return ByFileAndServer(config, log) if config.option.dist == "loadfile" else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark who starts processes, and give nightly tests more time.

    The workers of xdist begin with those that start processes: short tests even out the load at the end.
    """
    for item in items:
        if PROCESS_FIXTURES & set(getattr(item, "fixturenames", ())) or item.get_closest_marker("e2e"):
            item.add_marker(pytest.mark.processes)
        if item.get_closest_marker("nightly") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(NIGHTLY_S))
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: [not item.get_closest_marker(mark) for mark in ("e2e", "processes")])


def pytest_collection_finish() -> None:
    """Spare the garbage collector all modules, which stay: full collections would look through them again and again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Keep `make unit` honest: a test that starts a process without the mark `processes` fails."""
    global _unit_test
    _unit_test = None if any(map(item.get_closest_marker, ("processes", "gpu", "nightly"))) else item.nodeid
    try:
        return (yield)
    finally:
        _unit_test = None


def _refuse_processes(event: str, arguments: tuple[Any, ...]) -> None:
    if event in STARTING and _unit_test and (not arguments or Path(str(arguments[0])).name not in SMALL_PROGRAMS):
        raise AssertionError(f"{_unit_test} starts a process {arguments[:2]}: mark it with @pytest.mark.processes")


sys.addaudithook(_refuse_processes)


@pytest.fixture
def anyio_backend() -> str:
    """The event loop of tests that are coroutines, which have the mark `anyio`."""
    return "asyncio"


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ray_here() -> Iterator[None]:
    """A Ray of the module's own, with room for the actors of a small run."""
    import ray

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(address="local", include_dashboard=False, num_cpus=4, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2 with a character tokenizer and decided opinions about the next token."""
    from tests.kit.models import save_sharp_model

    return save_sharp_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained tiny Qwen2 with a character tokenizer. Nobody changes its folder."""
    from tests.kit.models import save_tiny_model

    folder = tmp_path_factory.mktemp("tiny") / "model"
    save_tiny_model("tiny-qwen2", folder, seed=0)
    return folder


@pytest.fixture(scope="session")
def running_sglang(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangServer]:
    from tests.kit.configs import server_config, with_keys
    from tests.kit.engines.servers import SGLangServer

    folder = tmp_path_factory.mktemp("logs")
    server = SGLangServer(with_keys(server_config("sglang", model_folder), folder / "keys"), folder)
    server.run(server.engine.start(), server.config.timeouts.startup_s)
    yield server
    server.close()


@pytest.fixture(scope="module")
def sglang_server(running_sglang: SGLangServer) -> SGLangServer:
    """Serves `model_folder` at version 0 or, after a test of the module that updates weights, at a later one."""
    from rollout_server.engines.sglang.engine import attach_server

    attach_server(running_sglang.admin, running_sglang.config)
    return running_sglang


@pytest.fixture(scope="session")
def smoke_yaml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 4 steps on an untrained tiny model, small enough for a few seconds of work."""
    from tests.kit.models import save_tiny_model

    folder = tmp_path_factory.mktemp("smoke")
    save_tiny_model("tiny-qwen2", folder / "model", seed=0)
    tree = {
        "run": {"name": "smoke", "dir": str(folder / "runs"), "steps": 4},
        "model": {"path": str(folder / "model")},
        "task": {
            "name": "reasoning_gym/spell_backward", "params": {"min_word_len": 3, "max_word_len": 5}, "size": 200,
            "max_prompt_tokens": 80,
        },
        "rollout": {"group_size": 4, "max_response_tokens": 12},
        "learner": {"prompts_per_step": 4, "lr": 1e-3, "max_tokens_per_microbatch": 1024},
        "staleness": {"max": 0},
        "algorithm": {"filter_zero_variance": False},  # an untrained model gets every answer wrong
        "eval": {"num_prompts": 8},
        "logging": {"wandb": "disabled"},
    }
    path = folder / "smoke.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., MarkedCommand]]:
    commands: list[MarkedCommand] = []

    def run(*arguments: str) -> MarkedCommand:
        commands.append(MarkedCommand(list(arguments), tmp_path / f"command-{len(commands)}.log"))
        return commands[-1]

    yield run
    for command in commands:
        command.kill()
