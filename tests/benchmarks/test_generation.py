"""SGLang's own benchmark beside the pipeline's: how it is asked, and how it fails."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from async_rl.errors import AsyncRLError
from benchmarks import generation
from tests.kit.configs import make_config

pytestmark = pytest.mark.processes

CONFIG = make_config(
    task={"max_prompt_tokens": 32}, rollout={"group_size": 4, "concurrency": 8, "max_response_tokens": 16}
)
ENGINE: Any = SimpleNamespace(url="http://127.0.0.1:1")


def test_sglang_is_asked_for_the_same_load_and_streams_no_more_than_the_pipeline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(generation, "SGLANG_BENCH", """
import json, sys
asked = dict(zip(sys.argv, sys.argv[1:]))
assert "--disable-stream" in sys.argv and asked["--num-prompts"] == "24" and asked["--max-concurrency"] == "32"
open(asked["--output-file"], "w").write(json.dumps({"output_throughput": 12.5}))
""")
    assert generation.sglang_bench(CONFIG, ENGINE, groups=6) == 12.5


def test_what_sglangs_benchmark_said_is_in_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "SGLANG_BENCH", "import sys; sys.exit('unrecognized arguments')")
    with pytest.raises(AsyncRLError, match=r"exit code 1:\nunrecognized arguments"):
        generation.sglang_bench(CONFIG, ENGINE, groups=6)
