"""The texts of rollout.stop: where a reply ends, and that all engines end it there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from async_rl.base.config import Config
from async_rl.base.models_and_data.model_folder import load_tokenizer
from rollout_server.engines.base import SampledReply, StopTexts
from tests.kit.configs import changed, server_config
from tests.kit.engines.replies import request_for, with_engine


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer: all bytes, and some longer pieces."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*alphabet, "ab", "ba", "bab", "Ġa", "ĊĊ"]
    inner = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[]))
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


TOKENIZER = byte_tokenizer()
USED = TOKENIZER.convert_tokens_to_ids(["a", "b", "ab", "ba", "bab", "Ġ", "Ġa", "Ċ", "ĊĊ", "Ã", "©"])  # é is Ã and ©
PROMPT_TOKENS = 3
STOPS = st.lists(st.sampled_from(["ab", "bb", "\n\n", " a\n", "é", "aé", "bab\n", "abababab"]), min_size=1, max_size=3)


def reply_of(tokens: list[int]) -> SampledReply:
    numbers = np.arange(len(tokens))
    return SampledReply(
        tokens=np.array(tokens, np.int32), logprobs=-numbers.astype(np.float32), versions=numbers.astype(np.int32),
        finish_reason="length", routing=np.arange(PROMPT_TOKENS + len(tokens) - 1, dtype=np.uint8)[:, None, None],
    )  # fmt: skip


@given(st.lists(st.sampled_from(USED), min_size=1, max_size=40), STOPS)
def test_a_reply_is_cut_after_the_first_token_that_completes_a_text(tokens: list[int], texts: list[str]) -> None:
    stop, whole = StopTexts(texts, TOKENIZER), reply_of(tokens)
    decoded = [TOKENIZER.decode(tokens[:count]) for count in range(1, len(tokens) + 1)]
    ends = [count for count, text in enumerate(decoded, 1) if any(each in text for each in texts)]
    cut = stop.cut(whole)
    assert cut.tokens.tolist() == tokens[: ends[0] if ends else None]
    assert cut.finish_reason == ("stop" if ends else "length")
    assert cut.logprobs.tolist() == whole.logprobs.tolist()[: len(cut.tokens)]
    assert cut.versions.tolist() == whole.versions.tolist()[: len(cut.tokens)]
    expected = np.arange(PROMPT_TOKENS + len(cut.tokens) - 1)
    np.testing.assert_array_equal(np.ravel(cut.routing), expected)  # the last token was not fed
    reached = [count for count in range(1, len(tokens) + 1) if stop.is_reached(tokens[:count])]
    assert reached[:1] == ends[:1]  # an engine that looks at the last tokens alone ends it there, too


def with_stop(config: Config, *texts: str) -> Config:
    return changed(config, rollout={"stop": texts})


def check_ends(folder: Path, stop: tuple[str, ...], replies: list[SampledReply]) -> set[str]:
    """Check that no reply goes on after a stop text; return the reasons for which they ended."""
    tokenizer: Any = load_tokenizer(folder)
    for reply in replies:
        tokens = reply.tokens.tolist()
        assert len(tokens) == len(reply.logprobs) == len(reply.versions)
        assert not any(text in tokenizer.decode(tokens[:-1]) for text in stop)
        has_text = any(text in tokenizer.decode(tokens) for text in stop)
        assert reply.finish_reason == ("stop" if has_text or tokens[-1] == tokenizer.eos_token_id else "length")
    return {"text" if any(text in tokenizer.decode(reply.tokens) for text in stop) else "other" for reply in replies}


def test_the_hf_engine_ends_a_reply_there_and_samples_the_same_until_then(model_folder: Path) -> None:
    stop, config = ("1", "ab"), server_config("hf", model_folder)
    request = request_for(3, n=64, max_tokens=30)
    whole = with_engine(config, lambda engine: engine.generate(request))
    ended = with_engine(with_stop(config, *stop), lambda engine: engine.generate(request))
    assert check_ends(model_folder, stop, ended) == {"text", "other"}
    cut = StopTexts(stop, load_tokenizer(model_folder)).cut
    for a, b in zip(map(cut, whole), ended, strict=True):
        assert a.tokens.tolist() == b.tokens.tolist() and a.finish_reason == b.finish_reason
        np.testing.assert_allclose(a.logprobs, b.logprobs, rtol=1e-4, atol=1e-6)
