from __future__ import annotations

import socket
import threading

import pytest
import torch

from async_rl.config import Limit
from async_rl.errors import WaitTimeoutError, WeightSyncError
from async_rl.weights.cuda_ipc import CudaIpcPublisher
from async_rl.weights.members import start_together
from tests.kit.configs import make_config

PUSH = Limit(30.0, "timeouts.push_s")


def test_the_first_failure_is_raised_while_another_call_still_runs() -> None:
    def refuse() -> None:
        raise ValueError("no such group")

    with pytest.raises(WeightSyncError, match="push of version 3: http://b failed: no such group"):
        start_together({"learner": threading.Event().wait, "http://b": refuse}, PUSH, "push of version 3")()


def test_a_timeout_names_the_call_that_did_not_return_and_the_key() -> None:
    with pytest.raises(WaitTimeoutError, match=r"joining: the learner waited 0 s \(timeouts\.push_s\) for http://b$"):
        start_together(
            {"learner": lambda: 1, "http://b": threading.Event().wait}, Limit(0.3, "timeouts.push_s"), "joining"
        )()


def test_a_server_that_never_answers_is_named_with_the_timeouts_key() -> None:
    config = make_config(timeouts={"push_s": 0.3})
    with socket.create_server(("127.0.0.1", 0)) as mute:
        url = f"http://127.0.0.1:{mute.getsockname()[1]}"
        publisher = CudaIpcPublisher(config, [url], 0, torch.device("cpu"))
        with pytest.raises(WaitTimeoutError, match=rf"waited 0 s \(timeouts\.push_s\) .* {url}/pause_generation"):
            publisher.release_server_memory()
        # The request and the wait for it have one limit, so either may end first.
        both = r"waited 0 s \(timeouts\.push_s\) for rollout/0|rollout/0 failed: waited 0 s \(timeouts\.push_s\)"
        with pytest.raises((WaitTimeoutError, WeightSyncError), match=both):
            publisher.call_servers(lambda admin: admin.end_update(), "end of a weight push")
        publisher.close()


def test_results_come_back_by_name() -> None:
    assert start_together({"a": lambda: 1, "b": lambda: 2}, PUSH, "sum")() == {"a": 1, "b": 2}


def test_a_call_that_has_waited_too_long_itself_is_a_timeout_too() -> None:
    def wait_too_long() -> None:
        raise WaitTimeoutError("http://b/update: the learner waited 3 s")

    with pytest.raises(WaitTimeoutError, match="push of version 3: http://b failed: http://b/update: the learner wai"):
        start_together({"http://b": wait_too_long}, PUSH, "push of version 3")()
