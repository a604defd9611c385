"""The HTTP endpoints of the hf engine: the part of SGLang's API that weight pushes and their verification use.

Tensors are collected between /begin_weight_update and /end_weight_update and loaded at the end, all between the same
two tokens, so a push that breaks off changes nothing.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from aiohttp import web
from safetensors.torch import load_file
from torch import Tensor, nn

from async_rl.base.config import NetworkConfig, TimeoutsConfig
from async_rl.base.models_and_data.model_folder import weight_files
from async_rl.base.network import authorization
from async_rl.base.network.ports import open_listener
from async_rl.base.weights.broadcast import Receiver
from async_rl.base.weights.checkpoint_names import from_checkpoint, to_checkpoint
from async_rl.base.weights.parcels import Rebuilder, checksum, is_parcel
from rollout_server.engines.sglang.admin import ERASE, SUMS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MAX_BODY_BYTES = 64 * 2**20
Handler = Callable[[dict[str, Any]], Awaitable[dict[str, Any] | None]]
"""Takes the JSON body of a request; returns the fields of the response beside `success` and `message`."""


class ServedModel(Protocol):
    """A model that samples, as its engine lets the endpoints stop it, replace its weights and score tokens with it."""

    model: PreTrainedModel

    async def pause(self, *, keep_kv: bool) -> None:
        """Stop sampling until `resume`; without `keep_kv` running replies go on with KV that is computed anew."""

    def resume(self) -> None:
        """Go on sampling."""

    async def load_weights(self, tensors: dict[str, Tensor], version: int) -> None:
        """Replace the weights of `model` by `tensors` between two tokens; what is sampled after has `version`."""

    async def erase_weights(self) -> None:
        """Fill the weights with NaN."""

    async def unloaded_weights(self) -> list[str]:
        """Return the names of the weights that hold a NaN."""
        ...

    async def prompt_logprobs(self, tokens: list[int]) -> list[float]:
        """Return log p(tokens[i + 1] | tokens[: i + 1]) for each i, len(tokens) - 1 numbers."""
        ...


class WeightEndpoints:
    """The hf engine's HTTP server for weight pushes. A refused request gets status 400 with the reason as `message`.

    Only requests with the run's API key are answered (without network.keys there is none), and only those whose Host is
    this server's address: with another, a web page has had a browser ask under a name of its own.
    """

    def __init__(
        self, engine: ServedModel, timeouts: TimeoutsConfig, network: NetworkConfig, model_folder: Path
    ) -> None:
        self._engine = engine
        self._timeouts = timeouts
        self._host, self._ports = network.host, network.port_range
        self._headers = authorization(network)
        self._receiver = Receiver()
        self.rebuilder = Rebuilder(lambda: weight_files(model_folder))
        self._staged: dict[str, Tensor] | None = None
        """The tensors received in the current weight update; None outside an update."""
        self._staged_version: int | None = None

    async def start(self) -> str:
        """Start to serve on a free port, in the running event loop, and return the base URL."""
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
        """Do nothing: /model_info and /flush_cache are only answered with `success: true`."""

    async def _join(self, body: dict[str, Any]) -> None:
        names = ("master_address", "master_port", "rank_offset", "world_size", "group_name", "backend")
        arguments = {name: body[name] for name in names}
        await asyncio.to_thread(self._receiver.join, **arguments, timeout_s=self._timeouts.push_s)

    async def _leave(self, body: dict[str, Any]) -> None:
        await asyncio.to_thread(self._receiver.leave, body["group_name"])

    async def _pause(self, body: dict[str, Any]) -> None:
        """Pause sampling. `in_place` keeps the KV of the running replies, `retract` and `abort` both drop it."""
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
        """Return the weights that parcels stand for, in memory of their own, as the model will use it."""
        device = self._engine.model.device
        return [(name, tensor.to(device, copy=True)) for name, tensor in self.rebuilder.rebuild(tensors)]

    async def _stage(self, tensors: list[tuple[str, Tensor]], version: str | None) -> None:
        if self._staged is None:
            raise ValueError("weights must be sent after /begin_weight_update and before /end_weight_update")
        if any(is_parcel(name) for name, _ in tensors):
            tensors = await asyncio.to_thread(self._rebuilt, tensors)
        expected = _checkpoint_state(self._engine.model)
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
        """Do one of the actions that verify a push, in the form of SGLang's weight checker."""
        if body["action"] == ERASE:
            await self._engine.erase_weights()
            return {}
        if body["action"] == SUMS:
            weights = _checkpoint_state(self._engine.model).items()
            return {"ranks": [{"checksums": {name: str(checksum(w.cpu().contiguous())) for name, w in weights}}]}
        return {"ranks": [{"checksums": dict.fromkeys(await self._engine.unloaded_weights(), "nan")}]}

    async def _score(self, body: dict[str, Any]) -> dict[str, Any]:
        """Answer /generate with the logprob of each token in `input_ids` after the first, in SGLang's format.

        Nothing is sampled; the other fields of the request are ignored.
        """
        tokens = body["input_ids"]
        logprobs = await self._engine.prompt_logprobs(tokens)
        entries = [[logprob, token, None] for logprob, token in zip([None, *logprobs], tokens, strict=True)]
        return {"meta_info": {"input_token_logprobs": entries}}


def replace_weights(
    model: nn.Module,
    tensors: Mapping[str, Tensor],  # [name in model.state_dict()] of the same shape, dtype and device
) -> None:
    """Make the model use the memory of `tensors` as its weights. Running replies would have to wait for a copy."""
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
    """Return the model's weights by the names that model folders and updates have; they are views of the weights."""
    return dict(to_checkpoint(model, model.state_dict().items()))


def _check_complete(model: PreTrainedModel, tensors: dict[str, Tensor]) -> None:
    """Raise ValueError unless `tensors` has every weight of the model. For tied weights one of the names is enough."""
    state = _checkpoint_state(model)
    covered = {state[name].data_ptr() for name in tensors}
    missing = [name for name, tensor in state.items() if tensor.data_ptr() not in covered]
    if missing:
        raise ValueError(f"the update lacks {len(missing)} tensors of the model: {', '.join(missing[:5])}")

