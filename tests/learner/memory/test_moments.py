"""The moments of a backward pass have what is there at the same time, and no more."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from learner.memory.memory_plan import BackwardPass
from learner.memory.passes import PassMemory
from learner.memory.sizes import Counts, NetworkSizes
from learner.models import token_scores

VOCAB, HIDDEN, LAYERS, BLOCK, NORM = 1000, 8, 4, 500, 8
TABLE = VOCAB * HIDDEN


@pytest.fixture(autouse=True)
def large_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(token_scores.LOGITS_BYTES, "cpu", 10**9)


def sizes(is_tied: bool = False, trains: Counts | None = None) -> NetworkSizes:
    rest = TABLE * (1 if is_tied else 2) + NORM
    has = Counts(all=rest + LAYERS * BLOCK, rest=rest, block=BLOCK, head=TABLE, embeddings=TABLE)
    return NetworkSizes(
        role="policy", config=SimpleNamespace(vocab_size=VOCAB), has=has, trains=trains or has, base=has.all, state=0,
        average=0,
        largest=TABLE, is_tied=is_tied, layers=LAYERS,
    )


def moments(network: NetworkSizes, **changes: Any) -> dict[str, float]:
    return found_pass(network, **changes).moments


def found_pass(network: NetworkSizes, **changes: Any) -> BackwardPass:
    rank: dict[str, Any] = {"device_type": "cpu", "dtype": torch.float32, "split": 1, "slices": 1}
    of_pass: dict[str, Any] = {"rows": 2, "tokens": 100, "is_first": True, "keeps_gradients": True}
    rank |= {name: value for name, value in changes.items() if name in rank}
    of_pass |= {name: value for name, value in changes.items() if name in of_pass}
    row: Any = PassMemory(kept=4000.0, peak=4600.0)
    return BackwardPass(SimpleNamespace(**rank), network, row, **of_pass)  # type: ignore[arg-type]


def test_the_root_is_gathered_in_the_whole_pass_and_its_gradients_wait() -> None:
    found = moments(sizes())
    gathered, logits = 4 * (2 * TABLE + NORM) + 4 * BLOCK, 4 * 100 * VOCAB
    assert found["logits"] == 8000 + gathered + 4 * TABLE + 1.3 * logits
    assert found["last block"] == 8000 + gathered + 4 * TABLE + 1200 + 8 * BLOCK
    of_blocks = 4 * LAYERS * BLOCK
    assert found["first block"] == 2000 + gathered + 4 * TABLE + 1200 + 8 * BLOCK + of_blocks
    assert found["embedding"] == gathered + 4 * (2 * TABLE + NORM) + of_blocks


def test_a_split_head_is_gathered_and_has_a_gradient_only_while_it_computes() -> None:
    found = moments(sizes(), split=2, slices=2)
    gathered, logits = 4 * NORM + 12 * BLOCK, 4 * 100 * VOCAB // 2
    assert found["logits"] == 8000 + gathered + 2 * TABLE + 2 * TABLE + 1.3 * logits
    in_shards = 2 * TABLE
    assert found["last block"] == 8000 + gathered + in_shards + 1200 + 8 * BLOCK
    of_blocks = 2 * LAYERS * BLOCK
    assert found["embedding"] == gathered + in_shards + of_blocks + 2 * TABLE + 8 * TABLE // 2


def test_a_split_head_that_is_the_embeddings_stays_and_its_gradient_waits() -> None:
    found = moments(sizes(is_tied=True), split=2, slices=2)
    gathered = 4 * NORM + 12 * BLOCK + 2 * TABLE
    assert found["last block"] == 8000 + gathered + 2 * TABLE + 1200 + 8 * BLOCK
    assert found["embedding"] == gathered + 2 * LAYERS * BLOCK + 12 * TABLE // 2


def test_a_chunk_of_the_heads_gradient_comes_when_its_logits_are_gone() -> None:
    many = found_pass(sizes(), split=2, slices=2, tokens=2)  # fewer logits than weights of the head
    assert many.scores == 2 * TABLE + (4 * 2 * VOCAB // 2 + 2 * TABLE)


def test_gradients_of_earlier_micro_batches_are_there_unless_the_host_has_them() -> None:
    first, later, offloaded = (
        moments(sizes(), is_first=is_first, keeps_gradients=keeps)["logits"]
        for is_first, keeps in ((True, True), (False, True), (False, False))
    )
    assert later - first == 4 * sizes().trains.all and offloaded == first


def test_frozen_weights_and_those_under_adapters_have_no_gradient() -> None:
    adapters = Counts(all=400, rest=0, block=100, head=0, embeddings=0)
    found = moments(sizes(trains=adapters))
    gathered = 4 * (2 * TABLE + NORM) + 4 * BLOCK
    assert found["logits"] == 8000 + gathered + 1.3 * 4 * 100 * VOCAB
    assert found["last block"] == 8000 + gathered + 1200 + 800
    assert found["embedding"] == gathered + 1600
