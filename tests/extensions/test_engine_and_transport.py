"""An engine and a transport from outside the packages generate and push through the public entry points."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from async_rl.base.config import Config, RunConfig, WeightSyncConfig
from async_rl.base.errors import ConfigError
from async_rl.base.weights.publisher import WeightPublisher, open_publisher
from async_rl.base.weights.servers import Members, ServerAdmin
from async_rl.run.before_start.dry_run import dry_run
from rollout_server.engines.base import SampledReply, open_engine
from tests.extensions.engine import COUNTING
from tests.extensions.transport import NewFolderTransport
from tests.kit.configs import changed, server_config
from tests.kit.engines.replies import recomputed_logprobs, request_for
from tests.kit.models import sharp_model
from tests.kit.publishers import OBJECT_ENGINE, url_of

ENGINE = "tests.extensions.engine:COUNTING"
TRANSPORT = "tests.extensions.transport:NEW_FOLDERS"


def extended_config(
    model_folder: Path, run_dir: Path, transport: str = TRANSPORT, engine: str = ENGINE, verify: bool = False
) -> Config:
    config = server_config("hf", model_folder)
    params = {} if engine == OBJECT_ENGINE else {"file": "tokens"}
    return changed(
        config, run=RunConfig(dir=str(run_dir)), rollout={"engine": engine, "params": params},
        weight_sync=WeightSyncConfig(transport=transport, verify_every=50 * verify),
    )


def test_an_engine_and_a_transport_from_outside_push_and_generate(model_folder: Path, tmp_path: Path) -> None:
    config = extended_config(model_folder, tmp_path)
    config.run_dir.mkdir()
    new = sharp_model("tiny-qwen2", 5).eval()

    async def generate_push_generate() -> tuple[list[SampledReply], list[SampledReply]]:
        engine = open_engine(config, 0, tmp_path)
        await engine.start()
        try:
            before = await engine.generate(request_for(1))
            publisher = open_publisher(config, [engine.url], 0, torch.device("cpu"))
            report = await asyncio.to_thread(publisher.push, new.named_parameters(), 4)
            publisher.close()
            assert report.num_bytes == sum(parameter.nbytes for parameter in new.parameters())
            return before, await engine.generate(request_for(1))
        finally:
            await engine.aclose()

    before, after = asyncio.run(generate_push_generate())
    assert {int(version) for answer in before for version in answer.versions} == {0}
    assert {int(version) for answer in after for version in answer.versions} == {4}
    for answer in after:
        assert answer.logprobs == pytest.approx(recomputed_logprobs(new, request_for(1), answer), rel=1e-3, abs=1e-4)
    counted = (tmp_path / "tokens-0.log").read_text().split()
    assert [counted.count(version) for version in ("0", "4")] == [
        sum(len(answer.tokens) for answer in answers) for answers in (before, after)
    ]


class UnfinishedAdmin:
    """The calls of a ServerAdmin that its author thought of: it can neither load a folder nor score tokens."""

    def is_ready(self) -> bool:
        return True

    def pause(self, on_update: str) -> None: ...
    def resume(self) -> None: ...
    def begin_update(self) -> None: ...
    def end_update(self) -> None: ...


class InheritingAdmin(ServerAdmin):
    """A class that inherits the calls of the protocol, which do nothing."""


UNFINISHED = dataclasses.replace(COUNTING, open_admin=UnfinishedAdmin)
INHERITING = dataclasses.replace(COUNTING, open_admin=InheritingAdmin)
MADE_BY_A_FUNCTION = dataclasses.replace(COUNTING, open_admin=lambda config, url: UnfinishedAdmin())


@pytest.mark.parametrize(
    ("engine", "lacking"),
    [
        ("UNFINISHED", r"load_folder .*erase_weights .*"), ("INHERITING", r"is_ready .*pause .*score_tokens"),
        ("MADE_BY_A_FUNCTION", "open_admin"),
    ],
)
def test_an_engine_whose_servers_cannot_be_updated_is_refused_before_anything_starts(
    model_folder: Path, tmp_path: Path, engine: str, lacking: str
) -> None:
    config = extended_config(model_folder, tmp_path, engine=f"{__name__}:{engine}", verify=True)
    with pytest.raises(ConfigError, match=lacking):
        dry_run(config)


def test_a_push_pauses_the_server_before_the_bytes_move_and_resumes_it_after_them(
    model_folder: Path, tmp_path: Path
) -> None:
    """The transport only stages and sends, as CONTRIBUTING.md shows it; it can neither forget nor move the pause."""
    calls: list[str] = []

    class RecordingServer:
        def __getattr__(self, name: str) -> Any:
            return lambda *_: calls.append(name)

    class RecordingTransport(NewFolderTransport):
        def stage(self, named_tensors: Iterator[tuple[str, torch.Tensor]], version: int) -> Any:
            calls.append("stage")
            return super().stage(named_tensors, version)

    config = extended_config(model_folder, tmp_path, engine=OBJECT_ENGINE)
    config.run_dir.mkdir()
    members = Members(config, {"rollout/0": url_of(RecordingServer())})
    publisher = WeightPublisher(RecordingTransport(config, members, 0, torch.device("cpu")))
    report = publisher.push([("w", torch.ones(4))], 1)
    assert calls == ["stage", "pause", "begin_update", "load_folder", "end_update", "resume"]
    assert 0.0 < report.pause_s <= report.seconds < 60.0
    assert report.num_bytes == 16
