from __future__ import annotations

from collections.abc import Iterator

import pytest

from buffer.client import LearnerClient
from buffer.server import BufferServer
from tests.kit.buffer.clients import learner_at
from tests.kit.buffer.serving import serving
from tests.kit.configs import buffer_config


@pytest.fixture
def buffer() -> Iterator[BufferServer]:
    with serving(buffer_config(prompts_per_step=4)) as server:
        yield server


@pytest.fixture
def learner(buffer: BufferServer) -> Iterator[LearnerClient]:
    with learner_at(buffer) as client:
        yield client
