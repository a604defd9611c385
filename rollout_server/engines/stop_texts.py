"""The texts of `rollout.stop`, which end a reply: where a reply has one for the first time, and what is left of it."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rollout_server.engines.base import SampledReply


class StopTexts:
    """Texts that end a reply with the token that completes one of them.

    That token is kept, though it may hold more than the end of the text: it was sampled, so it is trained on like the
    others. The tokens after it are as if they had not been sampled: a token depends only on those before it, so the
    logprobs that stay are right also if an engine has sampled on.

    Args:
        texts: one or more texts, none empty.
        tokenizer: decodes tokens; special tokens are text, too.
    """

    def __init__(self, texts: Sequence[str], tokenizer: Any) -> None:
        self._texts = tuple(texts)
        self._tokenizer = tokenizer
        # A token is at least a byte. The first tokens of a part may be decoded otherwise than within the whole reply.
        self._tail_tokens = max(len(text.encode()) for text in texts) + 4

    def is_reached(self, tokens: Sequence[int]) -> bool:
        """Return whether the last token completes one of the texts, in a reply that has not ended before."""
        return self._is_in(tokens[-self._tail_tokens :])

    def cut(self, reply: SampledReply) -> SampledReply:
        """Return the reply up to the token with which its text contains one of the texts, or as it is without any."""
        tokens = reply.tokens.tolist()
        if not self._is_in(tokens):
            return reply
        count = bisect.bisect_left(range(len(tokens)), True, lo=1, key=lambda count: self._is_in(tokens[:count]))
        return replace(
            reply, tokens=reply.tokens[:count], logprobs=reply.logprobs[:count], versions=reply.versions[:count],
            finish_reason="stop",
        )

    def _is_in(self, tokens: Sequence[int]) -> bool:
        text = self._tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
        return any(each in text for each in self._texts)
