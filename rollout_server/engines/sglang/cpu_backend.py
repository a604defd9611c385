"""Two changes to SGLang for CPUs: an attention backend for many short sequences, and a paused scheduler that sleeps.

SGLang's torch_native backend calls torch once per sequence and layer; with hundreds of short sequences in a batch the
calls, not the arithmetic, take most of the server's time. The backend here computes the same for several sequences per
call where each has one new token, and leaves every other case to SGLang's code.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.managers.scheduler import Scheduler
from torch import Tensor

from rollout_server.engines.sglang.decode_attention import decode_attention


class BatchedDecodeBackend(TorchNativeAttnBackend):
    """SGLang's torch_native backend, but sequences with one new token are computed together, not one by one."""

    def _run_sdpa_forward_decode(
        self, query: Tensor, output: Tensor, k_cache: Tensor, v_cache: Tensor, req_to_token: Tensor,
        req_pool_indices: Tensor, seq_lens: Tensor, encoder_lens: Tensor | None = None, **options: Any,
    ) -> Tensor:
        if encoder_lens is not None or options.get("sliding_window_size") is not None:
            return super()._run_sdpa_forward_decode(
                query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, encoder_lens,
                **options,
            )
        slots = req_to_token[req_pool_indices, : int(seq_lens.max())]
        output.copy_(decode_attention(query, k_cache, v_cache, slots, seq_lens, options["scaling"]))
        return output

    def _run_sdpa_forward_extend(
        self, query: Tensor, output: Tensor, k_cache: Tensor, v_cache: Tensor, req_to_token: Tensor,
        req_pool_indices: Tensor, seq_lens: Tensor, extend_prefix_lens: Tensor, extend_seq_lens: Tensor,
        encoder_lens: Tensor | None = None, **options: Any,
    ) -> Tensor:
        """Compute a prefill: sequences with one uncached token together, as in decoding, the others as SGLang does."""
        plain = encoder_lens is None and options["causal"] and options.get("sliding_window_size") is None
        single = extend_seq_lens == (1 if plain else -1)  # [B]
        tokens = torch.repeat_interleave(single, extend_seq_lens)  # [tokens]: the only new one of its sequence?
        if single.any():
            self._run_sdpa_forward_decode(
                query[tokens], part := torch.empty_like(output[tokens]), k_cache, v_cache, req_to_token,
                req_pool_indices[single], seq_lens[single], scaling=options["scaling"],
            )
            output[tokens] = part
        if not single.all():
            rest = ~single
            part = super()._run_sdpa_forward_extend(
                query[~tokens], torch.empty_like(output[~tokens]), k_cache, v_cache, req_to_token,
                req_pool_indices[rest], seq_lens[rest], extend_prefix_lens[rest], extend_seq_lens[rest],
                encoder_lens, **options,
            )
            output[~tokens] = part
        return output


def install() -> None:
    """Make both changes to SGLang. Call this in the process of SGLang's scheduler before the scheduler starts."""
    ATTENTION_BACKENDS["torch_native"] = BatchedDecodeBackend
    Scheduler._record_scheduler_state_for_paused_engine = _wait_while_paused


_record_paused = Scheduler._record_scheduler_state_for_paused_engine


def _wait_while_paused(scheduler: Scheduler) -> None:
    """Let a paused scheduler sleep until the next message, if the server has the flag `sleep-on-idle`.

    Unchanged, SGLang's scheduler polls while it is paused, on a core that the learner needs for the push.
    """
    _record_paused(scheduler)
    scheduler.maybe_sleep_on_idle()
