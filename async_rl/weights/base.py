"""What every transport shares: the pause around a push, concurrent calls to the servers, the parity check."""

from __future__ import annotations

import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import requests
import torch
from torch import Tensor

from async_rl.config import Config, Limit
from async_rl.errors import WaitTimeoutError, WeightSyncError
from async_rl.network import authorization
from async_rl.telemetry.timeline import Span

PAUSE_MODES = {"in_place": "in_place", "retract": "retract", "drain": "retract", "abort": "abort"}
"""How servers stand still, by `weight_sync.on_update`. Where training has drained them, evaluations may still run."""
LOST_WITHIN_S = 10.0
"""After a failed push a server that died has stopped answering by then."""
PROBE_TIMEOUT_S = 3.0
FLUSH_S = 30
RELEASED = ("weights", "kv_cache")
"""What a server lets go of for the learner's turn on the GPU. Its CUDA graphs stay: SGLang can release them only in a
mode that its default graphs for prefill refuse."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PushReport:
    """One push as rank 0 saw it; other ranks get zeros and no spans."""

    seconds: float = 0.0
    """From the first gather to the moment every server generates again."""
    pause_s: float = 0.0
    """How long the servers stood still."""
    num_bytes: int = 0
    spans: tuple[Span, ...] = ()
    """`sync` spans of the paused servers, pools `rollout/<index>`."""
    lost: tuple[str, ...] = ()
    """Servers that died on the way and were taken out. The push did not take place: repeat it, on every rank."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Of differences of logprobs between server and learner at equal weights."""

    mean: float
    largest: float


def run_together(calls: Mapping[str, Callable[[], Any]], limit: Limit, what: str) -> dict[str, Any]:
    """Run calls that wait for each other, each in a thread of its own; the first exception wins.

    Raises:
        WeightSyncError: a call raised; names it.
        WaitTimeoutError: not all returned within `limit`; names those still waiting.
    """
    return start_together(calls, limit, what)()


def start_together(calls: Mapping[str, Callable[[], Any]], limit: Limit, what: str) -> Callable[[], dict[str, Any]]:
    """As `run_together`, but returns at once; what it returns waits for the end.

    The threads are daemons: a collective that can no longer complete must not keep the process from ending.
    """
    done: queue.SimpleQueue[tuple[str, Any, BaseException | None]] = queue.SimpleQueue()
    deadline = time.monotonic() + limit.seconds

    def work(name: str, call: Callable[[], Any]) -> None:
        try:
            done.put((name, call(), None))
        except BaseException as error:
            done.put((name, None, error))

    def wait() -> dict[str, Any]:
        results: dict[str, Any] = {}
        while len(results) < len(calls):
            try:
                name, value, error = done.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                waiting = sorted(set(calls) - set(results))
                raise WaitTimeoutError(f"{what}: the learner waited {limit} for {', '.join(waiting)}") from None
            if error is not None:
                raise WeightSyncError(f"{what}: {name} failed: {error}") from error
            results[name] = value
        return results

    for name, call in calls.items():
        threading.Thread(target=work, args=(name, call), name=f"{what}: {name}", daemon=True).start()
    return wait


class WeightPublisher(ABC):
    """Learner side of a transport. Every rank calls `push`; only rank 0 talks to servers.

    Args:
        engine_urls: base URLs of the servers, in the order of their pools `rollout/<index>`.
    """

    def __init__(self, config: Config, engine_urls: Sequence[str], rank: int, device: torch.device) -> None:
        self.servers = {f"rollout/{index}": url for index, url in enumerate(engine_urls)}
        """Who gets the next push; rank 0 may change it between two."""
        self.rank = rank
        self.device = device
        self.bucket_bytes = config.weight_sync.bucket_bytes
        self.pause_mode = PAUSE_MODES[config.weight_sync.on_update]
        self.background = config.weight_sync.background
        self.paused_s = 0.0
        """Wall-clock of the servers' last stop."""
        self.takes_turns = config.takes_turns
        self._released: dict[str, tuple[str, ...]] = {}
        """[url] what of RELEASED a server is without."""
        self.timeouts = config.timeouts
        self.push_limit = config.timeouts.limit("push_s")
        self.tp = config.placement.rollout.tp
        self.dtype = serving_dtype(config, device.type)
        self.host = config.network.host
        self.session = requests.Session()
        self.session.headers.update(authorization(config.network))

    @abstractmethod
    def connect(self) -> None:
        """Prepare the way to every server of `servers`. Rank 0 waits for all of them, at most `timeouts.join_s`."""

    @abstractmethod
    def send(self, named_tensors: Iterator[tuple[str, Tensor]], version: int) -> PushReport:
        """The push itself, on rank 0."""

    def give_up(self) -> None:
        """After a failed push: leave every server in no update and, if it was paused, paused. A server that can't any
        more is found out by the next push.
        """
        with suppress(WeightSyncError, WaitTimeoutError):
            self.call_servers("/end_weight_update", {}, "end of a failed weight push")

    def push(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> PushReport:
        """Make every server serve `version`, whose weights are `named_tensors` under Hugging Face names.

        The iterable may gather each tensor collectively; it is consumed in full on every rank. Where a server turns
        out to be dead, it is dropped from `servers`, others that are paused stay so, and the report says so.

        Raises:
            WeightSyncError: a live server refused; it stays paused and must not be used.
            WaitTimeoutError: after `timeouts.push_s`, with every server alive.
        """
        tensors = iter(named_tensors)
        if self.takes_turns and self.device.type == "cuda":
            torch.cuda.empty_cache()  # what this rank holds in reserve, the servers need now
        try:
            if self.rank == 0:
                self.connect()
                return self.send(tensors, version)
        except (WeightSyncError, WaitTimeoutError):
            lost = self._find_lost()
            if not lost:
                raise
            for name in lost:
                del self.servers[name]
            self.give_up()
            return PushReport(lost=lost)
        finally:
            for _ in tensors:  # the other ranks gather on: every rank must
                pass
        return PushReport()

    def make_room(self) -> None:
        """The learner's turn on the GPU begins, and ends with the next push. On rank 0, after a batch is taken.

        Nothing generates for training then, as there is no admission before the push. Answers to an evaluation are
        held back, and go on with the new weights.
        """
        self._at_every_server(self._release_memory)

    def _release_memory(self, url: str) -> None:
        try:
            post(self.session, url, "/pause_generation", {"mode": "retract"}, self.push_limit)
            post(self.session, url, "/release_memory_occupation", {"tags": RELEASED}, self.push_limit)
        except WeightSyncError:
            if self._answers(url):
                raise
            return  # it died: the next push will find out
        self._released[url] = RELEASED

    def _resume_memory(self, tags: Sequence[str], url: str) -> None:
        """A server dies of a tag that it has not released."""
        released = self._released.get(url, ())
        if lacking := [tag for tag in released if tag in tags]:
            post(self.session, url, "/resume_memory_occupation", {"tags": lacking}, self.push_limit)
            self._released[url] = tuple(tag for tag in released if tag not in tags)

    def _at_every_server(self, call: Callable[[str], None]) -> None:
        """Returns, or raises the first error, when every call has ended."""
        with ThreadPoolExecutor(max(1, len(self.servers))) as threads:
            list(threads.map(call, self.servers.values()))

    def _find_lost(self) -> tuple[str, ...]:
        """Servers that do not answer, asked until one doesn't or LOST_WITHIN_S have passed."""
        deadline = time.monotonic() + LOST_WITHIN_S
        while True:
            with ThreadPoolExecutor(max(1, len(self.servers))) as threads:
                alive = dict(zip(self.servers, threads.map(self._answers, self.servers.values()), strict=True))
            lost = tuple(name for name in alive if not alive[name])
            if lost or time.monotonic() > deadline:
                return lost
            time.sleep(0.2)

    def _answers(self, url: str) -> bool:
        try:  # the session has the API key
            return self.session.get(url + "/ready", timeout=PROBE_TIMEOUT_S).status_code == 200
        except requests.RequestException:
            return False

    def close(self) -> None:
        self.session.close()

    def verify(self, tokens: Sequence[int], learner_logprobs: Sequence[float], tolerance: Tolerance) -> None:
        """Compare every server's logprobs of `tokens` with the learner's; rank 0 only.

        Args:
            learner_logprobs: log p(tokens[i + 1] | tokens[: i + 1]) at temperature 1, one fewer than `tokens`.

        Raises:
            WeightSyncError: they differ by more than `tolerance`: the server does not hold the learner's weights.
        """
        body = {
            "input_ids": list(tokens),
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "extra_key": f"verify-{time.time_ns()}",
        }
        replies = self.call_servers("/generate", body, "weight verification")
        for name, reply in replies.items():
            served = [entry[0] for entry in reply["meta_info"]["input_token_logprobs"]][1:]
            if len(served) != len(learner_logprobs):
                raise WeightSyncError(
                    f"weight verification: {name} returned {len(served)} logprobs for {len(learner_logprobs)} tokens"
                )
            differences = [abs(a - b) for a, b in zip(served, learner_logprobs, strict=True)]
            mean, largest = sum(differences) / len(differences), max(differences)
            if not (mean <= tolerance.mean and largest <= tolerance.largest):
                raise WeightSyncError(
                    f"weight verification: after the push {name} gives logprobs that differ from the learner's by "
                    f"{mean:.2e} in the mean (allowed {tolerance.mean:.0e}) and up to {largest:.2e} (allowed "
                    f"{tolerance.largest:.0e}): it does not serve the learner's weights. Compare the model folder of "
                    "both sides and weight_sync.transport."
                )

    def call_servers(self, path: str, body: dict[str, Any], what: str) -> dict[str, Any]:
        """POST to every server at once and return their JSON replies by name."""
        return run_together(self.calls(path, body), self.push_limit, what)

    def calls(self, path: str, body: dict[str, Any]) -> dict[str, Callable[[], Any]]:
        return {
            name: partial(post, self.session, url, path, body, self.push_limit)
            for name, url in self.servers.items()
        }

    def open_update(self) -> None:
        """The servers stand still from now on or, with `weight_sync.background`, not yet."""
        if not self.background:
            self._pause()
        self._at_every_server(partial(self._resume_memory, ("weights",)))
        self.call_servers("/begin_weight_update", {}, "begin of a weight push")

    def close_update(self) -> None:
        """The servers go on with what they have got."""
        if self.background:
            self._pause()
        self.call_servers("/end_weight_update", {}, "end of a weight push")
        self._at_every_server(partial(self._resume_memory, ("kv_cache",)))
        self.call_servers("/continue_generation", {}, "resume after a weight push")

    def _pause(self) -> None:
        """Stop generation as `weight_sync.on_update` has it.

        `retract` and `abort` leave no KV in use, so that the cache can be flushed, where a prompt may wait for its
        answers: a server told to flush while requests stand still in place refuses, and one told so by the update
        itself (`flush_cache`) dies. `in_place` relies on prefix-cache keys that no two groups share.
        """
        self.paused_s = time.time()
        self.call_servers("/pause_generation", {"mode": self.pause_mode}, "pause before a weight push")
        if self.pause_mode != "in_place":  # an aborted request may take a moment to end
            path = "/flush_cache" if self.pause_mode == "retract" else f"/flush_cache?timeout={FLUSH_S}"
            self.call_servers(path, {}, "flush of the KV cache before a weight push")

    def report(self, start_s: float, num_bytes: int) -> PushReport:
        """Of the push that began at `start_s` and has just ended."""
        end_s = time.time()
        return PushReport(
            seconds=end_s - start_s, pause_s=end_s - self.paused_s, num_bytes=num_bytes,
            spans=tuple(Span(name, "sync", self.paused_s, end_s, "weights") for name in self.servers),
        )


def post(session: requests.Session, url: str, path: str, body: dict[str, Any], limit: Limit) -> Any:
    """POST to a server; its refusal, in HTTP status or in `success: false`, raises WeightSyncError with its words."""
    try:
        reply = session.post(url + path, json=body, timeout=limit.seconds)
    except requests.Timeout:
        raise WaitTimeoutError(f"the learner waited {limit} for {url}{path}") from None
    except requests.RequestException as error:
        raise WeightSyncError(f"{url}{path}: {type(error).__name__}: is the rollout server still alive?") from error
    if reply.status_code != 200:
        raise WeightSyncError(f"{url}{path} answered {reply.status_code}: {reply.text[:300]}")
    try:
        answer = reply.json()
    except ValueError:
        return {}
    if isinstance(answer, dict) and answer.get("success") is False:
        raise WeightSyncError(f"{url}{path} refused: {answer.get('message', '')[:300]}")
    return answer


def serving_dtype(config: Config, device_type: str) -> torch.dtype:
    """What servers hold: `model.dtype`, where auto means bfloat16 on GPUs and float32 on CPU."""
    name = config.model.dtype
    if name == "auto":
        name = "float32" if device_type == "cpu" else "bfloat16"
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]
