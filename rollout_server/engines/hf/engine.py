"""The hf engine: samples with a transformers model in the worker's process, needs no server, and repeats exactly.

One thread owns the model and advances all rows by one token at a time. Everything else that uses the model (a weight
update, the logprobs for a verification) is a job that this thread runs between two tokens, so a token is sampled either
before or after an update, and its version is exact. `weight_sync.on_update` decides whether running replies keep their
KV cache over an update or recompute it.

Runs repeat exactly: a reply's random numbers are a function of (seed, prompt, sample, token), and groups requested in
the same turn of the event loop enter the batch together. Evaluations have their own batch, so their timing does not
change the batch shapes, and therefore the rounding, of training replies.

`WeightEndpoints` serves the part of SGLang's HTTP API that weight pushes and their verification use. Tensors are
collected between /begin_weight_update and /end_weight_update and loaded at the end, all between the same two tokens. So
a push that breaks off changes nothing.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from aiohttp import web
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from async_rl.base.config import Config, NetworkConfig, TimeoutsConfig
from async_rl.base.errors import ProcessDiedError, WaitTimeoutError
from async_rl.base.models_and_data.experts import recorded_experts
from async_rl.base.models_and_data.model_folder import end_tokens, forbidden_tokens, load_tokenizer, weight_files
from async_rl.base.models_and_data.model_loading import quiet_loading
from async_rl.base.network import authorization, open_listener
from async_rl.base.weights.checkpoint_names import from_checkpoint, to_checkpoint
from async_rl.base.weights.sums import value_sums
from async_rl.base.weights.transport import Receiver, serving_dtype
from rollout_server.engines.base import GenerationRequest, Load, Purpose, SampledReply, StopTexts, check_prompt
from rollout_server.engines.hf.batch import DecodingBatch, OpenRequest
from rollout_server.engines.http_admin import ERASE, SUMS, VALUE_SUMS

if TYPE_CHECKING:
    from async_rl.base.weights.parcels import Rebuilder

Result = TypeVar("Result")
Job = tuple[Callable[[], Any], Future[Any]]
"""A function that the decode thread calls, and the future for its result."""
_MAX_BODY_BYTES = 64 * 2**20
_TESTED_TOKENS = 16
"""The number of tokens with which the recording of routing is tested at the start."""
Handler = Callable[[dict[str, Any]], Awaitable[dict[str, Any] | None]]
"""A function from the JSON body of a request to the response's fields besides `success` and `message`."""


class HFEngine:
    """The `Engine` of rollout.engine=hf. It runs in the worker's process and does not use `log_dir`."""

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
        experts = await asyncio.to_thread(recorded_experts, self._config)
        routing = None
        if experts:
            from async_rl.base.models_and_data.routing import Routing

            routing = Routing(self.model, experts)
            tokens = torch.arange(_TESTED_TOKENS, device=self.model.device)[None]
            await asyncio.to_thread(routing.self_test, lambda: self.model(tokens).logits.float().log_softmax(-1))
        self.training = DecodingBatch(self.model, ends, forbidden, stop, routing)
        self.evaluation = DecodingBatch(self.model, ends, forbidden, stop)
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
        """Stop sampling; return when no token is being sampled any more. `resume` continues the running replies.

        Args:
            keep_kv: whether replies keep their KV cache. If not, `resume` recomputes it with the weights at that time.
        """
        with self._changed:
            self._paused = True
        await self.between_tokens(lambda: None if keep_kv else self._retract())

    def resume(self) -> None:
        with self._changed:
            self._paused = False
            self._changed.notify()

    async def load_weights(self, tensors: dict[str, Tensor], version: int) -> None:
        """Replace the model's weights and version between two decode steps; return when this is done."""

        def load() -> None:
            replace_weights(self.model, tensors)
            self.version = version

        await self.between_tokens(load)

    async def erase_weights(self) -> None:
        """Fill all weights with NaN. Called before a push that is verified."""

        def erase() -> None:
            for parameter in self.model.parameters():
                parameter.data.fill_(torch.nan)

        await self.between_tokens(erase)

    async def unloaded_weights(self) -> list[str]:
        """Return the names of the weights that contain a NaN."""
        named = list(self.model.named_parameters())
        return await self.between_tokens(lambda: [name for name, p in named if bool(p.amax().isnan())])

    async def value_sums(self) -> tuple[float, float]:
        """Return the sum of all weights' values, and the sum of their absolute values."""
        return await self.between_tokens(lambda: value_sums(self.model.parameters()))

    async def prompt_logprobs(self, tokens: list[int]) -> list[float]:
        """Return log p(tokens[i + 1] | tokens[: i + 1]) at temperature 1 for each i: len(tokens) - 1 numbers."""

        def score() -> list[float]:
            ids = torch.tensor([tokens], device=self.model.device)
            logits = self.model(input_ids=ids, use_cache=False).logits[0, :-1]
            logprobs = torch.log_softmax(logits.float(), dim=-1)
            return [float(p) for p in logprobs.gather(1, ids[0, 1:, None]).squeeze(1)]

        return await self.between_tokens(score)

    async def between_tokens(self, job: Callable[[], Result]) -> Result:
        """Run `job` in the decode thread between two tokens, also while paused; return its result or raise its error.

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
        """Wait for the future of a request or job, and return its result. Cancelling the wait cancels the future."""
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
        """The decode thread, which owns the model: samples tokens and runs jobs until the engine is closed or fails."""
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

        A round waits for work and runs the jobs. Unless paused, it then adds new groups and samples a token for each
        row.
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


class ServedModel(Protocol):
    """A model that samples. `WeightEndpoints` pauses it, replaces its weights, and scores tokens with it."""

    model: PreTrainedModel

    async def pause(self, *, keep_kv: bool) -> None:
        """Stop sampling until `resume`.

        Running replies keep their KV cache, or recompute it then if `keep_kv` is False.
        """

    def resume(self) -> None:
        """Continue sampling."""

    async def load_weights(self, tensors: dict[str, Tensor], version: int) -> None:
        """Replace the weights of `model` between two decode steps. Tokens sampled later are tagged with `version`.

        Args:
            tensors: the new weights by name. The model uses their memory.
        """

    async def erase_weights(self) -> None:
        """Fill the weights with NaN."""

    async def unloaded_weights(self) -> list[str]:
        """Return the names of the weights that contain a NaN."""
        ...

    async def value_sums(self) -> tuple[float, float]:
        """Return the sum of all weights' values, and the sum of their absolute values."""
        ...

    async def prompt_logprobs(self, tokens: list[int]) -> list[float]:
        """Return log p(tokens[i + 1] | tokens[: i + 1]) for each i: len(tokens) - 1 numbers."""
        ...


class WeightEndpoints:
    """The hf engine's HTTP server for weight pushes. A refused request gets status 400 with the reason as `message`.

    A request must carry the run's API key, if network.keys sets one, and its Host header must be this server's address.
    Another Host comes from a web page that makes a browser send requests under the page's own name.
    """

    def __init__(
        self, engine: ServedModel, timeouts: TimeoutsConfig, network: NetworkConfig, model_folder: Path
    ) -> None:
        self._engine = engine
        self._timeouts = timeouts
        self._host, self._ports = network.host, network.port_range
        self._headers = authorization(network)
        self._receiver = Receiver()
        self._model_folder = model_folder
        self.rebuilder: Rebuilder | None = None
        """Makes weights of parcels; None: none has arrived yet."""
        self._staged: dict[str, Tensor] | None = None
        """The tensors received in the current weight update; None outside an update."""
        self._staged_version: int | None = None

    async def start(self) -> str:
        """Start serving on a free port, in the running event loop, and return the base URL."""
        app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[self._check_sender])
        app.router.add_get("/model_info", _as_endpoint(self._accept))
        for path, handler in {
            "/init_weights_update_group": self._join,
            "/destroy_weights_update_group": self._leave,
            "/pause_generation": self._pause,
            "/flush_cache": self._accept,  # the engine has no prefix cache
            "/begin_weight_update": self._begin,
            "/update_weights_from_distributed": self._receive,
            "/update_weights_from_disk": self._load_folder,
            "/end_weight_update": self._end,
            "/continue_generation": self._resume,
            "/generate": self._score,
            "/weights_checker": self._check_weights,
        }.items():
            app.router.add_post(path, _as_endpoint(handler))
        self.runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self.runner.setup()
        await web.SockSite(self.runner, open_listener(self._host, self._ports)).start()
        self._address = f"{self._host}:{self.runner.addresses[0][1]}"
        return f"http://{self._address}"

    async def aclose(self) -> None:
        await self.runner.cleanup()

    @web.middleware
    async def _check_sender(self, request: web.Request, handler: Callable[..., Awaitable[web.StreamResponse]]) -> Any:
        if request.host != self._address:
            message = f"the Host must be {self._address}, got {request.host[:100]}"
            return web.json_response({"success": False, "message": message}, status=403)
        for name, value in self._headers.items():
            given = request.headers.get(name, "").encode(errors="surrogateescape")
            if not secrets.compare_digest(given, value.encode()):
                return web.json_response({"success": False, "message": "wrong API key"}, status=401)
        return await handler(request)

    async def _accept(self, body: dict[str, Any]) -> None:
        """Do nothing. Used for /model_info and /flush_cache, which are only answered with `success: true`."""

    async def _join(self, body: dict[str, Any]) -> None:
        names = ("master_address", "master_port", "rank_offset", "world_size", "group_name", "backend")
        arguments = {name: body[name] for name in names}
        await asyncio.to_thread(self._receiver.join, **arguments, timeout_s=self._timeouts.push_s)

    async def _leave(self, body: dict[str, Any]) -> None:
        await asyncio.to_thread(self._receiver.leave, body["group_name"])

    async def _pause(self, body: dict[str, Any]) -> None:
        """Pause sampling. Mode `in_place` keeps the KV cache of running replies; `retract` and `abort` drop it."""
        mode = body.get("mode")
        if mode not in ("in_place", "retract", "abort"):
            raise ValueError(f"the mode of a pause must be 'in_place', 'retract' or 'abort', got {mode!r}")
        await self._engine.pause(keep_kv=mode == "in_place")

    async def _resume(self, body: dict[str, Any]) -> None:
        self._staged = self._staged_version = None
        self._engine.resume()

    async def _begin(self, body: dict[str, Any]) -> None:
        self._staged, self._staged_version = {}, None
        self._receiver.begin_push()

    async def _receive(self, body: dict[str, Any]) -> None:
        group, names, dtypes, shapes = (body[key] for key in ("group_name", "names", "dtypes", "shapes"))
        # The bucket is received before it is checked: the sender broadcasts at the same time and would hang otherwise.
        device = self._engine.model.device
        tensors = await asyncio.to_thread(self._receiver.receive, group, names, dtypes, shapes, device)
        await self._stage(tensors, body.get("weight_version"))

    async def _load_folder(self, body: dict[str, Any]) -> None:
        tensors = await asyncio.to_thread(_read_folder, Path(body["model_path"]), self._engine.model.device)
        await self._stage(tensors, body.get("weight_version"))

    def _rebuilt(self, tensors: list[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        """Return the full weights that are encoded in `tensors`, the parcels of a compact push.

        The model may use their memory.
        """
        if self.rebuilder is None:
            from async_rl.base.weights.parcels import Rebuilder

            self.rebuilder = Rebuilder(lambda: weight_files(self._model_folder))
        device = self._engine.model.device
        return [(name, tensor.to(device, copy=True)) for name, tensor in self.rebuilder.rebuild(tensors)]

    async def _stage(self, tensors: list[tuple[str, Tensor]], version: str | None) -> None:
        if self._staged is None:
            raise ValueError("weights must be sent after /begin_weight_update and before /end_weight_update")
        expected = _checkpoint_state(self._engine.model)
        if any(name not in expected for name, _ in tensors):  # parcels, or tensors of another model
            tensors = await asyncio.to_thread(self._rebuilt, tensors)
        for name, tensor in tensors:
            if name not in expected:
                raise ValueError(f"the update brings the tensor {name!r}, which the model does not have")
            (shape, dtype), wanted = (tensor.shape, tensor.dtype), expected[name]
            if shape != wanted.shape or dtype != wanted.dtype:
                raise ValueError(f"{name} must be {wanted.dtype} {list(wanted.shape)}, got {dtype} {list(shape)}")
            self._staged[name] = tensor
        if version is not None:
            self._staged_version = int(version)

    async def _end(self, body: dict[str, Any]) -> None:
        staged, version = self._staged, self._staged_version
        if staged is None:
            raise ValueError("/begin_weight_update must be sent before /end_weight_update, got only the latter")
        self._staged = self._staged_version = None  # a learner that gives up the push sends /end_weight_update again
        if version is not None:  # the version comes with the last bucket: without it the push has broken off
            _check_complete(self._engine.model, staged)
            tensors = await asyncio.to_thread(from_checkpoint, self._engine.model, staged)
            await self._engine.load_weights(tensors, version)
            self._receiver.end_push()

    async def _check_weights(self, body: dict[str, Any]) -> dict[str, Any]:
        """Do one of the actions that verify a push. Request and response have the form of SGLang's weight checker."""
        if body["action"] == ERASE:
            await self._engine.erase_weights()
            return {}
        if body["action"] == SUMS:
            from async_rl.base.weights.parcels import checksum

            weights = _checkpoint_state(self._engine.model).items()
            return {"ranks": [{"checksums": {name: str(checksum(w.cpu().contiguous())) for name, w in weights}}]}
        if body["action"] == VALUE_SUMS:
            values, sizes = await self._engine.value_sums()
            return {"ranks": [{"checksums": {"values": repr(values), "sizes": repr(sizes)}}]}
        return {"ranks": [{"checksums": dict.fromkeys(await self._engine.unloaded_weights(), "nan")}]}

    async def _score(self, body: dict[str, Any]) -> dict[str, Any]:
        """Answer /generate with the logprob of each token in `input_ids` after the first, in SGLang's format.

        Nothing is sampled. Other fields of the request are ignored.
        """
        tokens = body["input_ids"]
        logprobs = await self._engine.prompt_logprobs(tokens)
        entries = [[logprob, token, None] for logprob, token in zip([None, *logprobs], tokens, strict=True)]
        return {"meta_info": {"input_token_logprobs": entries}}


def replace_weights(
    model: nn.Module,
    tensors: Mapping[str, Tensor],  # [name in model.state_dict()] of the same shape, dtype and device
) -> None:
    """Make the model use `tensors` as its weights without copying them; a copy would delay running replies."""
    places: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    places.update(model.named_buffers(remove_duplicate=False))
    for name, tensor in tensors.items():
        places[name].data = tensor.detach()


def _as_endpoint(handler: Handler) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def reply(request: web.Request) -> web.Response:
        try:
            response = await handler(await request.json() if request.can_read_body else {})
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            return web.json_response({"success": False, "message": message}, status=400)
        return web.json_response({"success": True, "message": "", **(response or {})})

    return reply


def _read_folder(folder: Path, device: torch.device) -> list[tuple[str, Tensor]]:
    # The tensors are copied, because safetensors maps the file itself, which a later push removes.
    return [
        (name, tensor.to(device, copy=True))
        for file in weight_files(folder)
        for name, tensor in load_file(file).items()
    ]


def _checkpoint_state(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return views of the model's weights, by the names that they have in model folders and weight updates."""
    return dict(to_checkpoint(model, model.state_dict().items()))


def _check_complete(model: PreTrainedModel, tensors: dict[str, Tensor]) -> None:
    """Raise ValueError unless `tensors` has every weight of the model. Of tied weights, one name is enough."""
    state = _checkpoint_state(model)
    covered = {state[name].data_ptr() for name in tensors}
    missing = [name for name, tensor in state.items() if tensor.data_ptr() not in covered]
    if missing:
        raise ValueError(f"the update lacks {len(missing)} tensors of the model: {', '.join(missing[:5])}")
