"""Rank 0 of the learner asks the buffer for a batch, and every rank gets the answer: a batch, a push, or the end."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from async_rl.errors import NothingToLearnError
from buffer.client import LearnerClient
from learner.ranks import broadcast_frames


@dataclass(frozen=True, slots=True)
class BatchFrames:
    """A batch as the buffer sent it, for `decode_batch`."""

    frames: Sequence[bytes | memoryview]


@dataclass(frozen=True, slots=True)
class PushWanted:
    """A rollout server came back and waits for weights; the batch is asked for again after the push."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """The user has stopped the run."""


@dataclass(frozen=True, slots=True)
class NothingToLearn:
    """The buffer will hand out no batch any more."""

    reason: str


Handout = BatchFrames | PushWanted | Stopped | NothingToLearn


def ask_buffer(
    client: LearnerClient, version: int, is_stopping: Callable[[], bool], is_push_wanted: Callable[[], bool]
) -> Handout:
    """Wait until batch number `version` is there or one of the functions returns True; return which happened.

    The functions are called every few seconds.

    Raises:
        WaitTimeoutError: neither happened within timeouts.batch_s.
    """
    try:
        frames = client.take_raw(version, lambda: is_stopping() or is_push_wanted())
    except NothingToLearnError as error:
        return NothingToLearn(str(error))
    if frames:
        return BatchFrames(frames)
    return Stopped() if is_stopping() else PushWanted()


def share_handout(handout: Handout | None, device: torch.device) -> Handout:
    """Return rank 0's `handout` on every rank; the other ranks pass None. Collective.

    The first frame is a header with the kind and the reason; a batch's frames follow.
    """
    message: list[bytes | memoryview] = []
    if handout is not None:
        message.append(json.dumps([type(handout).__name__, getattr(handout, "reason", "")]).encode())
        message += getattr(handout, "frames", ())
    header, *frames = broadcast_frames(message, device)
    match json.loads(header):
        case ["BatchFrames", _]:
            return BatchFrames(frames)
        case ["NothingToLearn", reason]:
            return NothingToLearn(reason)
        case ["Stopped", _]:
            return Stopped()
    return PushWanted()
