"""The instructions of scripts/Dockerfile, carried out in a root of its own, as far as that goes without Docker."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.documents import ROOT

pytestmark = [pytest.mark.nightly, pytest.mark.processes]

HOST = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc", sys.base_prefix)
"""What stands for the base image: this host's programs and its lists of packages, Debian's or Ubuntu's."""
APT = 'APT::Get::Simulate "true"; APT::Sandbox::User "root"; Debug::NoLocking "true";'
"""apt reads the real lists, finds each package and what it needs, and installs nothing."""
INSTALLED = "from importlib.metadata import files; print(*files('async-rl'), sep='\\n')"


@pytest.mark.skipif(not (shutil.which("bwrap") and shutil.which("apt-get")), reason="needs bubblewrap and apt-get")
def test_each_line_of_the_dockerfile_works_with_what_it_copies(tmp_path: Path) -> None:
    """pip builds the package and fetches Ray as the line says, but not gigabytes of CUDA packages (PIP_NO_DEPS)."""
    root, folder = tmp_path / "root", Path("/")
    for name in ("tmp", "opt", "var/lib/apt/lists/partial", "var/cache/apt/archives/partial", "var/lib/dpkg"):
        (root / name).mkdir(parents=True)
    (root / "var/lib/dpkg/status").touch()  # no package is there yet
    (root / "tmp/apt.conf").write_text(APT)
    environment = {
        **{name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_", "http"))},
        "PATH": f"{sys.base_prefix}/bin:/usr/bin:/bin", "HOME": "/tmp", "APT_CONFIG": "/tmp/apt.conf",
        "PIP_NO_DEPS": "1",
    }
    seen = [word for path in HOST if Path(path).exists() for word in ("--ro-bind", path, path)]
    apart = ["bwrap", "--unshare-all", "--share-net", "--uid", "0", "--gid", "0", "--bind", str(root), "/"]

    def run(command: str) -> str:
        shell = [*apart, *seen, "--proc", "/proc", "--dev", "/dev", "--chdir", str(folder), "sh", "-c", command]
        done = subprocess.run(shell, env=environment, capture_output=True, text=True, timeout=800)
        assert done.returncode == 0, command + done.stdout[-2000:] + done.stderr[-4000:]
        return done.stdout

    text = re.sub(r"^#.*\n", "", (ROOT / "scripts" / "Dockerfile").read_text(), flags=re.MULTILINE)
    instructions = re.sub(r"\\\n\s*", "", text).splitlines()
    for instruction, rest in (line.split(" ", 1) for line in instructions):
        if instruction == "RUN":
            run(rest)
        elif instruction == "ENV":
            name, _, value = rest.partition("=")
            environment[name] = value.replace(f"${name}", environment[name])
        elif instruction == "WORKDIR":
            folder = Path(rest)
            Path(f"{root}{folder}").mkdir(exist_ok=True)
        elif instruction == "COPY":
            *sources, target = rest.split()
            for source in sources:
                whole = ["-T"] if (ROOT / source).is_dir() else []
                subprocess.run(["cp", "-a", *whole, ROOT / source, f"{root}{folder}/{target}"], check=True)
        else:
            assert instruction == "FROM"
    tracked = subprocess.run(
        ["git", "ls-files", "async_rl/*.py", "buffer/*.py", "learner/*.py", "rollout_server/*.py"], cwd=ROOT,
        check=True, capture_output=True, text=True,
    ).stdout.split()
    installed = run(f'python -c "{INSTALLED}"').splitlines()
    assert {*tracked, "async_rl/docs/how-to/gpus.md", "../../../bin/async-rl"} <= {*installed}
