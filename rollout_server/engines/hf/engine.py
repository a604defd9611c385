"""The hf engine: samples with a transformers model in the worker's process, needs no server, and repeats exactly.

One thread owns the model and advances all rows by one token at a time. Everything else that uses the model (a weight
update, the logprobs for a verification) is a job that this thread runs between two tokens, so a token is sampled either
before or after an update, and its version is exact. Running replies keep their KV cache over an update or recompute it,
depending on `weight_sync.on_update`.

Runs repeat exactly: a reply's random numbers are a function of (seed, prompt, sample, token), and groups requested in
the same turn of the event loop enter the batch together. Evaluations have their own batch, so that their timing does
not change the batch shapes, and with them the rounding, of training replies.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from async_rl.base.config import Config
from async_rl.base.errors import ProcessDiedError, WaitTimeoutError
from async_rl.base.models_and_data.model_folder import end_tokens, forbidden_tokens, load_tokenizer
from async_rl.base.models_and_data.model_loading import quiet_loading
from async_rl.base.weights.transport import serving_dtype
from rollout_server.engines.base import GenerationRequest, Load, Purpose, SampledReply, check_prompt
from rollout_server.engines.hf.batch import DecodingBatch, OpenRequest
from rollout_server.engines.hf.weights import WeightEndpoints, replace_weights
from rollout_server.engines.stop_texts import StopTexts

Result = TypeVar("Result")
Job = tuple[Callable[[], Any], Future[Any]]
"""A function to be called by the decode thread, and the place of its result."""


class HFEngine:
    """The `Engine` of rollout.engine=hf. It runs in the worker's process and writes nothing into `log_dir`."""

    def __init__(self, config: Config, index: int, log_dir: Path | None = None) -> None:
        self.url = ""
        self.vocab_size = 0
        self.version = 0
        self._config = config
        self._name = f"hf engine {config.server_names[index]}"
        self._changed = threading.Condition()
        # _changed guards the next four attributes.
        self._arrivals: list[OpenRequest] = []
        self._jobs: list[Job] = []
        self._paused = False
        self._stopping = False
        self._failure: BaseException | None = None
        self._collected: list[OpenRequest] = []
        """The requests made in the current turn of the event loop."""
        self._futures: set[Future[Any]] = set()
        """The results of requests and jobs that are awaited."""

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.model = await asyncio.to_thread(_load, self._config)
        ends = frozenset(await asyncio.to_thread(end_tokens, self._config.model.path))
        self.vocab_size = int(self.model.config.get_text_config().vocab_size)
        texts, path = self._config.rollout.stop, self._config.model.path
        stop = StopTexts(texts, await asyncio.to_thread(load_tokenizer, path)) if texts else None
        forbidden = await asyncio.to_thread(forbidden_tokens, self._config)
        self.training, self.evaluation = (DecodingBatch(self.model, ends, forbidden, stop) for _ in range(2))
        self._thread = threading.Thread(target=self._decode, name=self._name, daemon=True)
        self._thread.start()
        self.endpoints = WeightEndpoints(
            self, self._config.timeouts, self._config.network, Path(self._config.model.path)
        )
        self.url = await self.endpoints.start()

    async def generate(self, request: GenerationRequest) -> list[SampledReply]:
        """Wait until the decode thread has sampled `request.n` replies, and return them."""
        check_prompt(request.prompt, self.vocab_size)
        self._check_alive()
        group = OpenRequest(request)
        if not self._collected:
            asyncio.get_running_loop().call_soon(self._submit_collected)
        self._collected.append(group)
        try:
            return await self._result_of(group.future)
        finally:
            group.cancelled = True  # this has no effect on a complete group

    async def load(self) -> Load:
        slots = self._config.rollout.max_groups_in_flight * self._config.rollout.group_size
        return Load(min(len(self.training) + len(self.evaluation), slots), slots)

    async def aclose(self) -> None:
        if not self.url:
            return
        await self.endpoints.aclose()
        with self._changed:
            self._stopping = True
            self._changed.notify()
        limit = self._config.timeouts.limit("shutdown_s")
        await asyncio.to_thread(self._thread.join, limit.seconds)
        if self._thread.is_alive():
            raise WaitTimeoutError(f"{self._name} waited {limit} for its decode thread to end")

    async def pause(self, *, keep_kv: bool) -> None:
        """Stop sampling until `resume` is called; return when no token is being sampled any more.

        Running answers then continue: with `keep_kv` on the KV that they have, without it on KV that is recomputed with
        the weights at that time.
        """
        with self._changed:
            self._paused = True
        await self.between_tokens(lambda: None if keep_kv else self._retract())

    def resume(self) -> None:
        with self._changed:
            self._paused = False
            self._changed.notify()

    async def load_weights(self, tensors: dict[str, Tensor], version: int) -> None:
        """Replace the model's weights by `tensors`, and its version, between two tokens; return when this is done."""

        def load() -> None:
            replace_weights(self.model, tensors)
            self.version = version

        await self.between_tokens(load)

    async def erase_weights(self) -> None:
        """Fill the weights with NaN, before a push that is verified."""

        def erase() -> None:
            for parameter in self.model.parameters():
                parameter.data.fill_(torch.nan)

        await self.between_tokens(erase)

    async def unloaded_weights(self) -> list[str]:
        """Return the names of the weights that hold a NaN."""
        named = list(self.model.named_parameters())
        return await self.between_tokens(lambda: [name for name, p in named if bool(p.amax().isnan())])

    async def prompt_logprobs(self, tokens: list[int]) -> list[float]:
        """Return log p(tokens[i + 1] | tokens[: i + 1]) at temperature 1 for each i, len(tokens) - 1 numbers."""

        def score() -> list[float]:
            ids = torch.tensor([tokens], device=self.model.device)
            logits = self.model(input_ids=ids, use_cache=False).logits[0, :-1]
            logprobs = torch.log_softmax(logits.float(), dim=-1)
            return [float(p) for p in logprobs.gather(1, ids[0, 1:, None]).squeeze(1)]

        return await self.between_tokens(score)

    async def between_tokens(self, job: Callable[[], Result]) -> Result:
        """Run `job` in the thread that owns the model, also while paused, and return its result or raise its error.

        Raises:
            WaitTimeoutError: the job was not done within timeouts.push_s.
            ProcessDiedError: the engine has failed or is closed.
        """
        future: Future[Result] = Future()
        limit = self._config.timeouts.limit("push_s")
        with self._changed:
            self._check_alive()
            self._jobs.append((job, future))
            self._changed.notify()
        try:
            async with asyncio.timeout(limit.seconds):
                return await self._result_of(future)
        except TimeoutError:
            raise WaitTimeoutError(f"a request about weights waited {limit} for {self._name} to carry it out") from None

    async def _result_of(self, future: Future[Result]) -> Result:
        """Wait for a request's or job's `future` and return its result. If the wait is cancelled, so is the future."""
        self._futures.add(future)
        try:
            return await asyncio.wrap_future(future)
        finally:
            self._futures.discard(future)

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise ProcessDiedError(
                f"{self._name} failed: {type(self._failure).__name__}: {self._failure}"
            ) from self._failure
        if self._stopping:
            raise ProcessDiedError(f"{self._name} is closed, and answers no further request")

    def _submit_collected(self) -> None:
        groups, self._collected = self._collected, []
        with self._changed:
            self._arrivals += groups
            self._changed.notify()

    def _decode(self) -> None:
        """The decode thread, which owns the model: sample and run jobs until the engine is closed or fails."""
        try:
            with torch.inference_mode():
                while self._advance():
                    pass
        except Exception as error:
            self._failure = error
        with self._changed:
            self._stopping = True
        with suppress(RuntimeError):  # the event loop, and all that waited in it, has ended already
            self._loop.call_soon_threadsafe(self._fail_all)

    def _advance(self) -> bool:
        """Do one round of the decode thread; return False if the engine was closed.

        It waits for work, runs the jobs and, unless paused, adds new groups and samples one token for each row.
        """
        with self._changed:
            while not (self._stopping or self._jobs or (not self._paused and self._has_work())):
                self._changed.wait()  # whoever adds work notifies, and has a timeout of its own
            if self._stopping:
                return False
            jobs, self._jobs = self._jobs, []
            arrivals: list[OpenRequest] = []
            paused = self._paused
            if not paused:
                arrivals, self._arrivals = self._arrivals, []
        for job, future in jobs:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(job())
                except Exception as error:
                    future.set_exception(error)
        if paused:
            return True
        for batch, is_evaluation in ((self.training, False), (self.evaluation, True)):
            new = [
                group for group in arrivals
                if (group.request.purpose is Purpose.EVALUATION) == is_evaluation and not group.cancelled
            ]
            for group in [*batch.add(new, self.version), *batch.step(self.version)]:
                if group.future.set_running_or_notify_cancel():
                    group.future.set_result(group.replies)
        return True

    def _has_work(self) -> bool:
        return bool(self._arrivals or len(self.training) or len(self.evaluation))

    def _fail_all(self) -> None:
        """Make all waiting requests and jobs raise ProcessDiedError, because the decode thread has ended."""
        try:
            self._check_alive()
        except ProcessDiedError as error:
            for future in self._futures:
                if not future.done():
                    future.set_exception(error)

    def _retract(self) -> None:
        self.training.retract()
        self.evaluation.retract()


def _load(config: Config) -> PreTrainedModel:
    """Load the model in its serving dtype onto the first GPU, or the CPU if there is none, and return it."""
    device, path = torch.device("cuda:0" if torch.cuda.is_available() else "cpu"), config.model.path
    kinds = {"dtype": serving_dtype(config, device.type), "attn_implementation": config.model.attn_implementation}
    with quiet_loading():
        model = AutoModelForCausalLM.from_pretrained(path, **kinds)
    return model.to(device).eval()  # type: ignore[arg-type]
