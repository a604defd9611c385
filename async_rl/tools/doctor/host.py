"""`async-rl doctor`: checks this machine and a configuration, and gives advice for each failure.

The checks of several nodes are in async_rl/tools/doctor/cluster.py.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from async_rl.base.config import Config
from async_rl.base.errors import ConfigError
from async_rl.base.models_and_data.fetching import located, pinned
from async_rl.base.models_and_data.hub import NotInCacheError, data_files, model_folder
from async_rl.base.models_and_data.hub_names import hub_repos
from async_rl.base.seams import ENGINES, EngineEntry
from async_rl.base.seams.lookup import doc_page
from async_rl.run.before_start.gpus import check_gpu_driver
from async_rl.run.before_start.preflight import check_inputs
from rollout_server.rewards.code.sandbox import THREE_WAYS, Bubblewrap

IMPORT_TIMEOUT_S = 180
REINSTALL = f"make venv (or reinstall with the pip commands of {doc_page('how-to/install.md')})"
GPU_TOOLS = (
    "SGLang builds kernels with nvcc, of a CUDA toolkit (CUDA_HOME), and ninja, a package; its own are linked to "
    "libnuma.so.1, of the system's package libnuma1 or numactl-libs; where learner and server take turns on a GPU it "
    "needs the package torch-memory-saver"
)


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check, a line of the table. `broken`: a run can't work; `warn`: it works with drawbacks."""

    what: str
    state: Literal["ok", "warn", "broken"]
    found: str
    mend: str = ""
    """Advice, if the check is not ok."""


def examine(config: Config | None, *, is_driver: bool = True) -> Iterator[Check]:
    """Check this machine and, if given, a configuration, as `check_inputs` does. Yields results as they come."""
    used = config.engine_entries if config else {}
    yield Check("python", "ok", f"{sys.version.split()[0]} in {sys.prefix}")
    yield from (check_package(name) for name in ("torch", "transformers", "ray"))
    for name, entry in (used or ENGINES).items():
        if entry.packages and (used or not entry.python or Path(entry.server_python("")).exists()):
            yield check_engine(name, entry, config)
    yield check_gpu(used.values())
    try:
        Bubblewrap().check()
        yield Check("sandbox", "ok", "programs in answers are contained by bubblewrap")
    except ConfigError as error:  # the reward `code` and some scorers of reasoning_gym need it
        yield Check("sandbox", "warn", f"{error}".partition(". ")[0], THREE_WAYS)
    if config:
        yield from examine_config(config, is_driver)


def print_table(checks: Iterable[Check]) -> bool:
    """Print each result as a line as soon as it is known, and its advice. Returns whether no check is broken."""
    states = set()
    for check in checks:
        print(f"{check.state:<6}  {check.what:<25}  {check.found}", flush=True)
        if check.state != "ok" and check.mend:
            print(f"        to mend it: {check.mend}")
        states.add(check.state)
    return "broken" not in states


def check_package(name: str) -> Check:
    """Check that a package can be imported; an installed package may still fail to load."""
    try:
        importlib.import_module(name)
    except Exception as error:
        return Check(name, "broken", f"can't be imported: {str(error).partition(chr(10))[0]}", REINSTALL)
    return Check(name, "ok", metadata.version(name))


def check_engine(name: str, entry: EngineEntry, config: Config | None) -> Check:
    """Check that an engine's package can be imported by the Python of its servers.

    A failure is `broken` only with a `config`, which uses the engine.
    """
    package, own = entry.packages[0], bool(entry.python)
    python = entry.server_python(config.rollout.python if config else "") if own else sys.executable
    code = f"import {package}; print({package}.__version__)"
    if package == "sglang":  # its import needs stubs of packages, which must not stay in this process
        stubs = "import async_rl; from rollout_server.engines.sglang import import_stubs as stubs; stubs.install()"
        code = f"{stubs}; import sglang.srt.entrypoints.http_server; {code}"
    try:
        command = [python, *(["-I"] if own else []), "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_TIMEOUT_S)
        said = ((done.stderr if done.returncode else done.stdout).strip().splitlines() or [""])[-1]
        if done.returncode == 0:
            return Check(name, "ok", f"{said} in {python}")
    except (OSError, subprocess.TimeoutExpired) as error:
        said = str(error)
    mend = f"`make {name}`, or set rollout.python to the Python of an environment with {package}" if own else REINSTALL
    found = f"{package} can't be imported by {python}: {said}"
    return Check(name, "broken" if config else "warn", found, f"{mend}, or use the engine of this package: hf")


def check_gpu(engines: Collection[EngineEntry]) -> Check:
    """Check that torch finds this host's GPUs, and that there are tools for SGLang's kernels if `engines` needs them.

    Without a config `engines` is empty, and missing tools are a warning.
    """
    try:
        import torch

        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        if not names:
            check_gpu_driver()
            return Check("GPU", "ok", "none: everything runs on the CPU")
    except Exception as error:
        return Check("GPU", "broken" if isinstance(error, ConfigError) else "warn", str(error), REINSTALL)
    found = f"{len(names)} x {names[0]}"
    uses_sglang = not engines or any("sglang" in engine.packages for engine in engines)
    if uses_sglang and (missing := _missing_gpu_tools()):
        return Check("GPU", "broken" if engines else "warn", f"{found}, but no {', '.join(missing)}", GPU_TOOLS)
    return Check("GPU", "ok", found)


def _missing_gpu_tools() -> list[str]:
    """Return the programs, libraries and packages that SGLang's server needs on a GPU and that this host lacks."""
    import torch

    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    path = os.pathsep.join(
        [os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath), f"{home or '/usr/local/cuda'}/bin"]
    )
    missing = [] if shutil.which("ninja", path=path) else ["ninja"]
    wanted = (torch.version.cuda or "").partition(".")[0]
    if nvcc := shutil.which("nvcc", path=f"{home}/bin" if home else path):  # the one that SGLang takes
        said = ""
        with suppress(OSError, subprocess.TimeoutExpired):  # it can't be run, or hangs
            said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=IMPORT_TIMEOUT_S).stdout
        found = re.search(r"release (\d+)", said)
        if found is None or found[1] != wanted:
            missing.append(f"nvcc of CUDA {wanted} ({nvcc} is of {found[1] if found else 'an unknown version'})")
    else:
        missing.append("nvcc")
    try:
        ctypes.CDLL("libnuma.so.1")
    except OSError:
        missing.append("libnuma.so.1")
    return missing if importlib.util.find_spec("torch_memory_saver") else [*missing, "torch_memory_saver"]


def examine_config(config: Config, is_driver: bool) -> Iterator[Check]:
    """Make the checks that `async-rl train` makes before a run, up to the first that fails.

    Nothing is downloaded. If a model or data set in the config is on the hub and not in this host's cache, the result
    is a warning, and no further check is made.
    """
    try:
        config = pinned(config)
        for repo in hub_repos(config):
            data_files(repo, cached_only=True) if repo.kind == "dataset" else model_folder(repo, cached_only=True)
            yield Check(repo.key, "ok", repo.name)
        cautions = check_inputs(located(config), is_driver=is_driver)
    except NotInCacheError:
        found = f"{repo.name} is on the hub, not in this host's cache: nothing that needs it is checked"
        yield Check(repo.key, "warn", found, "`async-rl train CONFIG --dry-run` downloads it, and so does a run")
    except Exception as error:  # also of a damaged file
        yield Check("configuration", "broken", str(error) if isinstance(error, ConfigError) else repr(error))
    else:
        yield from (Check("configuration", "warn", caution) for caution in cautions)
        yield Check("configuration", "ok", "a run would start")
