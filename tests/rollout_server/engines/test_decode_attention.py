from __future__ import annotations

import pytest
import torch

from rollout_server.engines.sglang import decode_attention
from rollout_server.engines.sglang.decode_attention import decode_attention as attend


@pytest.mark.parametrize("slice_tokens", [1, 40, 10_000])
def test_a_ragged_batch_equals_the_softmax_of_each_sequence_alone(
    slice_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_attention, "SLICE_TOKENS", slice_tokens)
    torch.manual_seed(0)
    lengths = torch.tensor([3, 17, 1, 9, 17, 2])
    query = torch.randn(6, 4, 8)
    keys, values = torch.randn(50, 2, 8), torch.randn(50, 2, 8)
    keys[0], values[0] = float("nan"), float("nan")  # the slots of padding must not have an effect
    slots = torch.zeros(6, 17, dtype=torch.int32)
    for row, length in enumerate(lengths.tolist()):
        slots[row, :length] = torch.randperm(49)[:length] + 1

    output = attend(query, keys, values, slots, lengths, scaling=0.3)

    for row, length in enumerate(lengths.tolist()):
        for head in range(4):
            own = slots[row, :length].long()
            weights = torch.softmax(keys[own, head // 2] @ query[row, head] * 0.3, dim=0)
            torch.testing.assert_close(output[row, head], weights @ values[own, head // 2])


def test_attention_runs_on_the_device_of_its_inputs() -> None:
    """On a host with GPUs tensors are not on torch's default device: every new tensor must be on that of the inputs."""
    torch.manual_seed(0)
    lengths, slots = torch.tensor([2, 3]), torch.tensor([[0, 1, 0], [2, 3, 4]])
    query, keys, values = torch.randn(2, 4, 8), torch.randn(5, 2, 8), torch.randn(5, 2, 8)
    expected = attend(query, keys, values, slots, lengths, scaling=0.3)
    with torch.device("meta"):
        output = attend(query, keys, values, slots, lengths, scaling=0.3)
    torch.testing.assert_close(output, expected)
