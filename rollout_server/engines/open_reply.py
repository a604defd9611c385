"""Collects one reply from the responses of a server: one response or, where weight pushes abort requests, several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from async_rl.base.errors import AsyncRLError
from async_rl.base.types import IntArray
from rollout_server.engines.base import SampledReply


@dataclass(slots=True)
class OpenReply:
    """One reply while a server samples it. It needs more than one request only if a weight push aborts the first."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: str = ""
    """`stop` or `length`; empty until the reply has ended."""
    sample: int = 0
    """The reply's number in its group."""

    def reply(self) -> SampledReply:
        return SampledReply(
            tokens=np.array(self.tokens, dtype=np.int32), logprobs=np.array(self.logprobs, dtype=np.float32),
            versions=np.array(self.versions, dtype=np.int32), finish_reason=self.finish_reason,
        )

    def extend(
        self, tokens: list[int], logprobs: list[float], spans: list[dict[str, Any]] | None, end: str, *,
        max_tokens: int, end_tokens: Sequence[int], may_abort: bool,
    ) -> None:
        """Append the tokens that one request has sampled, and set finish_reason if the reply has ended.

        Args:
            spans: the server's weight_versions; see token_versions.
            end: why the request ended: `stop` (by an end token), `length`, `abort`, or anything else, an error.
            max_tokens: the longest reply.

        Raises:
            AsyncRLError: the response is incomplete, or not ended by stop, length or, with `may_abort`, an abort.
        """
        aborted = end == "abort"
        if not (tokens or aborted) or len(logprobs) != len(tokens) or None in logprobs:
            raise AsyncRLError(
                "the rollout server must send one logprob for each token, "
                f"got {len(tokens)} tokens and logprobs {logprobs[:20]}"
            )
        self.tokens += tokens
        self.logprobs += logprobs
        self.versions += token_versions(spans, len(tokens)).tolist()
        if end == "stop" or (aborted and tokens and tokens[-1] in end_tokens):  # an abort can come with the last token
            self.finish_reason = "stop"
        elif end == "length" or (aborted and len(self.tokens) == max_tokens):
            self.finish_reason = "length"
        elif not (aborted and may_abort):
            raise AsyncRLError(
                f"the rollout server did not finish a reply: finish_reason {end}. Its log in run_dir/logs may say why"
            )


def token_versions(spans: list[dict[str, Any]] | None, num_tokens: int) -> IntArray:
    """Return the version of each token, [num_tokens], from a server's spans `{version, start, end}` (end excluded).

    Raises:
        AsyncRLError: the spans do not cover the tokens in order.
    """
    versions = np.empty(num_tokens, dtype=np.int32)
    covered = 0
    for span in spans or ():
        if span["start"] != covered or not str(span["version"]).isdecimal():
            break
        covered = span["end"]
        versions[span["start"] : covered] = int(span["version"])
    if covered != num_tokens:
        raise AsyncRLError(
            f"the rollout server's weight_versions must cover {num_tokens} tokens with whole-number versions, got "
            f"{spans}. Servers of the versions that constraints/ pins report them, older ones do not."
        )
    return versions
