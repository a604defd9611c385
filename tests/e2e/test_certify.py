"""`async-rl certify`: whole runs of hf and SGLang, sound ones and with an error in the engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from async_rl.cli import main
from tests.kit.tiny_moe import save_moe

PLANTED = "tests.kit.engines.planted"
SMALL = ("learner.prompts_per_step=16", "rollout.group_size=8", "model.dtype=float32")


def certify(smoke_yaml: Path, tmp_path: Path, engine: str, *overrides: str) -> tuple[int, dict[str, tuple[str, str]]]:
    """The exit code, and the state and the finding of each axis by its name."""
    code = main(["certify", str(smoke_yaml), f"run.dir={tmp_path}", f"rollout.engine={engine}", *SMALL, *overrides])
    (summary,) = tmp_path.glob("*/summary.json")
    axes = json.loads(summary.read_text())["certificate"]
    return code, {axis["name"]: (axis["state"], axis["finding"]) for axis in axes}


@pytest.mark.e2e
@pytest.mark.parametrize(
    "engine", ["hf", pytest.param("sglang", marks=pytest.mark.nightly)]
)
def test_a_sound_run_is_certified_exact_in_float32(engine: str, smoke_yaml: Path, tmp_path: Path) -> None:
    code, axes = certify(smoke_yaml, tmp_path, engine)
    assert {name: state for name, (state, _) in axes.items()} == {
        "weights": "exact", "precision": "exact", "support": "not measured", "routing": "not measured",
        "age of KV": "not measured",
    }, axes  # fmt: skip
    assert code == 0


@pytest.mark.e2e
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("engine", "named"), [("COLD", "temperature"), ("COLD_SGLANG", "temperature"), ("NARROW_SGLANG", "support")]
)
def test_an_error_in_the_engine_ends_with_code_1_and_its_name(
    engine: str, named: str, smoke_yaml: Path, tmp_path: Path
) -> None:
    code, axes = certify(smoke_yaml, tmp_path, f"{PLANTED}:{engine}")
    state, finding = axes["precision"]
    assert (code, state) == (1, "broken") and named in finding, axes


@pytest.mark.e2e
@pytest.mark.nightly
@pytest.mark.parametrize(("engine", "state"), [("sglang", "exact"), (f"{PLANTED}:SHIFTED_SGLANG", "broken")])
def test_a_certificate_tells_if_experts_are_those_of_the_token_before(
    engine: str, state: str, smoke_yaml: Path, tmp_path: Path
) -> None:
    model = save_moe(tmp_path / "model", num_experts=8, num_experts_per_tok=2)
    code, axes = certify(smoke_yaml, tmp_path, engine, f"model.path={model}")
    assert (axes["precision"][0], axes["routing"][0], code) == (state, state, int(state == "broken")), axes
    assert ("routing" in axes["precision"][1]) == (state == "broken"), axes
