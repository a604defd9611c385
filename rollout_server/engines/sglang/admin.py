"""The `ServerAdmin` of an SGLang server that can receive weights while it generates (weight_sync.double_buffer).

SGLang's own weight endpoints wait until no request runs, unless the server is paused. So buckets are announced to
threads of the server's ranks through the TCP store of the push's process group. Only the swap is an HTTP request.
"""

from __future__ import annotations

import base64
import pickle
from typing import TYPE_CHECKING

from async_rl.base.config import Config
from rollout_server.engines.http_admin import HttpAdmin, update_fields

if TYPE_CHECKING:
    from async_rl.base.weights.servers import Bucket
    from rollout_server.engines.sglang.staged_weights import BucketAnnouncer

BASE_VARIABLE = "ASYNC_RL_BASE_MODEL"
"""The environment variable that gives a server the folder of the model it starts with."""
SWAP = "rollout_server.engines.sglang.staged_weights.swap"
"""The name of the server's custom weight loader that puts staged weights into use."""
_NO_TENSORS = base64.b64encode(pickle.dumps([])).decode()
"""An empty list of tensors, in SGLang's form."""


class SGLangAdmin(HttpAdmin):
    """An HttpAdmin for weight_sync.double_buffer: sends weights during generation and swaps them in during a pause.

    Without double_buffer it is a plain HttpAdmin.
    """

    def __init__(self, config: Config, url: str) -> None:
        super().__init__(config, url)
        self._place = config.weight_sync.double_buffer
        self._tp = config.placement.rollout.tp
        self._announcer: BucketAnnouncer | None = None
        self._is_first = True
        self._staged_version: int | None = None
        """The version that the server has staged; None: its last bucket is missing."""
        self._in_session = False

    @property
    def _stages(self) -> bool:
        return self._place != "none"

    def join_group(
        self, *, name: str, host: str, port: int, first_rank: int, world_size: int, backend: str
    ) -> None:
        super().join_group(
            name=name, host=host, port=port, first_rank=first_rank, world_size=world_size, backend=backend
        )
        if self._stages:
            from rollout_server.engines.sglang.staged_weights import BucketAnnouncer

            self._announcer = BucketAnnouncer(host, port, name, range(first_rank, first_rank + self._tp))

    def begin_update(self) -> None:
        if not self._stages:
            super().begin_update()
        self._is_first, self._staged_version = True, None

    def receive_bucket(self, bucket: Bucket, version: int | None, group_name: str) -> None:
        if not self._stages:
            super().receive_bucket(bucket, version, group_name)
            return
        assert self._announcer is not None
        self._announcer.announce(bucket, self._place, self._is_first, self._push_limit, self.is_ready)
        self._is_first, self._staged_version = False, version

    def end_update(self) -> None:
        """Put the staged weights into use.

        If the last bucket was not received, the push failed and the old weights stay.
        """
        if not self._stages:
            super().end_update()
            return
        version, self._staged_version = self._staged_version, None
        if version is not None:
            super().begin_update()
            self._in_session = True
            tensors = {"serialized_named_tensors": [_NO_TENSORS] * self._tp, "load_format": SWAP}
            self.ask("POST", "/update_weights_from_tensor", tensors | update_fields(version))
        if self._in_session:  # otherwise the request would wait until the server is idle
            super().end_update()
            self._in_session = False
