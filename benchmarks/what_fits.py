"""Says which of Qwen2.5's models fit which GPUs, by the sum that `async-rl train --dry-run` makes before a run.

    python -m benchmarks.what_fits                                        # a table of all cases, about a minute
    python -m benchmarks.what_fits --out benchmarks/results/what_fits.md

No GPU is needed, and nothing is loaded: model folders have the headers of weight files, and activations are measured
with tensors without data. All of it is arithmetic; no case has run on a GPU. The configuration is
configs/gsm8k_two_node.yaml, with rows of at most 1,536 tokens, but for the settings that a case names.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path

from transformers import Qwen2Config

from async_rl.config.loading import load_config
from async_rl.driver.memory import GIB, MemoryPlan
from async_rl.errors import ConfigError
from benchmarks.model_loading import QWEN2_5, save_headers

CONFIG = Path(__file__).parents[1] / "configs" / "gsm8k_two_node.yaml"
HOST_BYTES = 2**40
ONE = ("placement.learner.gpus_per_node=0", "placement.rollout.nodes=0", "placement.rollout.servers=1",
       "placement.rollout.tp=1", "learner.prompts_per_step=64")  # fmt: skip
"""One GPU that learner and server share at once."""
EIGHT = ("placement.learner.gpus_per_node=4", "placement.rollout.nodes=0", "placement.rollout.servers=4",
         "placement.rollout.tp=1")  # fmt: skip
"""One node: a learner of four GPUs, four servers."""
PAIRS = (*EIGHT, "placement.learner.gpus_per_node=8", "placement.rollout.servers=8")
"""One node with a learner rank and a server on each GPU."""
AT_ONCE = ("placement.colocated=true", "staleness.max=1")
IN_TURNS = ("placement.colocated=true", "staleness.max=0")
SMALL_SHARE, HALF, ADAPTERS = "rollout.mem_fraction=0.3", "rollout.mem_fraction=0.5", "model.lora.rank=32"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCase:
    """A model on hosts whose GPUs are all alike."""

    model: str
    hosts: str
    """The hosts in words."""
    gpu_gb: int
    gpus: int = 8
    """GPUs of the learner's node."""
    settings: tuple[str, ...] = ()
    """Settings, beside those of CONFIG, that place the run on these hosts."""
    named: tuple[str, ...] = ()
    """Further settings, which the table shows."""


CASES = [
    MemoryCase(model="0.5B", hosts="one GPU", gpu_gb=24, gpus=1, settings=ONE, named=(SMALL_SHARE,)),
    MemoryCase(model="0.5B", hosts="one GPU", gpu_gb=80, gpus=1, settings=ONE),
    MemoryCase(model="7B", hosts="one GPU", gpu_gb=80, gpus=1, settings=ONE),
    MemoryCase(model="7B", hosts="one GPU", gpu_gb=80, gpus=1, settings=ONE, named=(ADAPTERS, SMALL_SHARE)),
    MemoryCase(model="7B", hosts="one GPU", gpu_gb=80, gpus=1, settings=ONE, named=(*IN_TURNS, ADAPTERS, HALF)),
    MemoryCase(model="7B", hosts="one GPU", gpu_gb=80, gpus=1, settings=ONE, named=(*IN_TURNS, "learner.offload=all")),
    MemoryCase(model="7B", hosts="one GPU", gpu_gb=141, gpus=1, settings=ONE, named=IN_TURNS),
    MemoryCase(model="7B", hosts="one GPU", gpu_gb=141, gpus=1, settings=ONE, named=(*IN_TURNS, SMALL_SHARE)),
    MemoryCase(
        model="7B", hosts="one GPU", gpu_gb=141, gpus=1, settings=ONE, named=(*IN_TURNS, "learner.offload=moments"),
    ),
    MemoryCase(model="7B", hosts="eight GPUs: 4 ranks, 4 servers", gpu_gb=80, settings=EIGHT),
    MemoryCase(
        model="7B", hosts="eight GPUs: a rank and a server on each", gpu_gb=80, settings=PAIRS, named=IN_TURNS,
    ),
    MemoryCase(
        model="7B", hosts="eight GPUs: a rank and a server on each", gpu_gb=80, settings=PAIRS, named=AT_ONCE,
    ),
    MemoryCase(
        model="7B", hosts="eight GPUs: a rank and a server on each", gpu_gb=80, settings=PAIRS, named=(*AT_ONCE, HALF),
    ),
    MemoryCase(
        model="32B", hosts="eight GPUs: 4 ranks, 2 servers of 2", gpu_gb=80,
        settings=(*EIGHT, "placement.rollout.servers=2", "placement.rollout.tp=2"),
    ),
    MemoryCase(
        model="32B", hosts="eight GPUs: 4 ranks, 2 servers of 2", gpu_gb=80,
        settings=(*EIGHT, "placement.rollout.servers=2", "placement.rollout.tp=2"), named=("learner.offload=all",),
    ),
    MemoryCase(model="7B", hosts="two nodes: 8 ranks, 2 servers of 4", gpu_gb=80),
    MemoryCase(model="32B", hosts="two nodes: 8 ranks, 2 servers of 4", gpu_gb=80),
    MemoryCase(
        model="32B", hosts="two nodes: 8 ranks, 2 servers of 4", gpu_gb=80,
        named=("learner.offload=moments",),
    ),
    MemoryCase(model="32B", hosts="two nodes: 8 ranks, 2 servers of 4", gpu_gb=141),
    MemoryCase(model="72B", hosts="two nodes: 8 ranks, 2 servers of 4", gpu_gb=141, named=("learner.offload=all",)),
]
SHOWN = [index for index, case in enumerate(CASES) if case.model == "7B" and case.hosts.startswith("two")]
"""The cases whose whole table is printed, as `--dry-run` prints it."""
HEADER = """| model | GPUs | settings | a rank needs | it has | on the host: kept + checkpoint \
| KV cache of a server | |
| --- | --- | --- | ---: | ---: | ---: | ---: | --- |
"""


def plan(case: MemoryCase, folder: Path) -> MemoryPlan:
    """Return the plan of a case with the headers of its model in `folder`."""
    if not folder.exists():
        save_headers(Qwen2Config(**QWEN2_5[case.model], max_position_embeddings=32_768), folder)
    defaults = ("learner.gradient_checkpointing=auto",)
    config = load_config(CONFIG, [f"model.path={folder}", *defaults, *case.settings, *case.named])
    return MemoryPlan(config, case.gpus, case.gpu_gb * 10**9, HOST_BYTES)


def row(case: MemoryCase, planned: MemoryPlan) -> str:
    """Return a case's row of the table."""
    memory, room = planned.rank_memory(), planned.room
    checkpoint = memory.host["checkpoint being written"]
    kept, ranks = sum(memory.host.values()) - checkpoint, planned.config.placement.learner.ranks
    host = " + ".join(f"{ranks * size / GIB:.0f}" for size in (kept, checkpoint))
    how = "with checkpointing" if planned.checkpoints else "without checkpointing"
    try:
        cautions = planned.check()
    except ConfigError as error:
        verdict = "refused" + _advice(str(error))
    else:
        verdict = f"starts with a caution{_advice(cautions[0])}" if cautions else "fits"
    tokens = planned.kv_tokens
    settings = ", ".join(f"`{setting.replace('=', ': ')}`" for setting in case.named)
    return (
        f"| {case.model} | {case.hosts}, {case.gpu_gb} GB | {settings} | {memory.peak / GIB:.0f} GiB, {how} | "
        f"{room.rank / GIB:.0f} GiB | {host} GiB | {tokens:,} tokens | {verdict} |"
    )


def _advice(message: str) -> str:
    found = message.rpartition("Set ")[2] if "Set " in message else message.rpartition(": ")[2]
    return f": {found.strip()}"


def report() -> str:
    """Return the tables of all cases."""
    lines, tables = [], ""
    with tempfile.TemporaryDirectory() as folder:
        for index, case in enumerate(CASES):
            planned = plan(case, Path(folder) / case.model)
            lines.append(row(case, planned))
            if index in SHOWN:
                tables += "\n    " + "\n    ".join(planned.table()) + "\n"
    return "# What fits, by arithmetic\n\n" + HEADER + "\n".join(lines) + "\n" + tables


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="also write the tables to this file")
    arguments = parser.parse_args()
    text = report()
    print(text)
    if arguments.out:
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()
