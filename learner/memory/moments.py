"""Adds up what a network needs for one micro-batch at each moment of the backward pass that may be the fullest.

    logits       the output head: all activations are there, logits, and the gradient of the head
    last block   where the backward pass of the blocks begins: all activations, and what a block's pass makes
    first block  where it ends: the activations of one block, and the gradients of all others
    embedding    the gradients of embeddings and of what else is no block, until they are split over the ranks

FSDP2 shards each block by itself and all the rest, the root, together: the root is gathered in the whole pass, and its
gradients are split when the pass is over. With learner.sequence_parallel embeddings and head are no part of it, but
units of their own: each is gathered only while it computes, and the head's gradient is split before the blocks' are
computed, unless both are the same tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

from learner.memory.activations import PassMemory
from learner.memory.network_sizes import NetworkSizes
from learner.memory.optimizer_state import MASTER_BYTES
from learner.models import token_scores


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """The memory of one network's backward pass over a micro-batch on one rank, in bytes.

    Weights as they are held, optimizer state and what belongs to other networks are not counted.
    """

    network: NetworkSizes
    passes: PassMemory
    rows: int
    """The rows of a micro-batch of full length."""
    tokens: int
    """The tokens of it that this rank has."""
    device_type: str
    itemsize: int
    """The bytes of a number of the compute type."""
    split: int
    """Over how many ranks weights are split."""
    slices: int
    """Over how many of them a row, the output head and the embeddings are split."""
    is_first: bool
    """Whether there are no gradients of earlier micro-batches."""
    keeps_gradients: bool
    """Whether gradients stay on the device once they are split; with learner.offload all they don't."""

    @property
    def kept(self) -> float:
        """The bytes that the forward pass keeps for the backward pass."""
        return self.rows * self.passes.kept

    @property
    def root(self) -> int:
        """The bytes of weights that a forward pass leaves gathered."""
        return self._rest("last block") if self.slices == 1 or not self.network.is_tied else 0

    @property
    def gathered(self) -> int:
        """The most weights in the compute type at a time: those of a block or three, and of what is no block."""
        rests = (self._rest("logits"), self._rest("first block"), self._rest("embedding"))
        return self._blocks + max(rests)

    @property
    def scores(self) -> int:
        """Logits and the gradient of the head; see token_scores.py and split_vocabulary.py.

        A chunk's part of that gradient, where it is added to a sum, comes when nothing but the gradient of the logits,
        in the compute type, is left of them.
        """
        network, size = self.network, self.itemsize
        if not network.head:
            return 0
        limit = token_scores.LOGITS_BYTES[self.device_type]
        wanted, is_narrow = 4 * self.tokens * -(-network.config.vocab_size // self.slices), size < MASTER_BYTES
        logits, head = min(wanted, limit), network.trained_head // self.slices
        is_added = self.slices > 1 or (is_narrow and wanted > limit)
        gradient = head * (MASTER_BYTES if is_added else size)
        made = round(logits * (1.5 if is_narrow else 1.3))
        return gradient + max(made, logits * size // 4 + head * size * is_added)

    def at_each(self) -> dict[str, float]:
        """Return the bytes at each moment."""
        network, block = self.network, self._unsplit(self.network.trained_block)
        of_block = self.rows * (self.passes.peak - self.passes.kept) + block
        loss = {
            "logits": self.kept + self.scores,
            "last block": self.kept + of_block + self._head_gradient,
            "first block": self.kept / max(1, network.layers) + of_block + self._head_gradient,
        }
        found = {name: size + self._blocks + self._rest(name) + self._gradients(name) for name, size in loss.items()}
        return found | {"embedding": self._blocks + self._embedding + self._gradients("embedding")}

    @property
    def _blocks(self) -> int:
        """The bytes of gathered blocks: the one that computes, and the next one, flat and taken apart."""
        return self.itemsize * self.network.block * (1 if self.split == 1 else 3)

    def _rest(self, moment: str) -> int:
        """Return the gathered weights of what is no block."""
        network = self.network
        if self.slices == 1:
            return self.itemsize * network.rest
        untied = 0 if network.is_tied else network.head
        numbers = network.rest - network.embeddings - untied  # the root
        if network.is_tied or moment == "embedding":
            numbers += network.embeddings // self.slices
        elif moment == "logits":
            numbers += network.head // self.slices
        return self.itemsize * numbers

    @property
    def _head_gradient(self) -> int:
        """The gradient of the head that waits, whole, until the pass is over."""
        is_split_already = self.slices > 1 and not self.network.is_tied
        return 0 if is_split_already else self.itemsize * self.network.trained_head // self.slices

    def _gradients(self, moment: str) -> int:
        """Return the gradients that are split over the ranks already."""
        network = self.network
        if not self.keeps_gradients:
            return 0
        if not self.is_first:
            return MASTER_BYTES * network.trained // self.split
        numbers = 0
        if moment != "logits" and self.slices > 1 and not network.is_tied:
            numbers += network.trained_head
        if moment in ("first block", "embedding"):
            numbers += network.trained - network.trained_rest
        return MASTER_BYTES * numbers // self.split

    @property
    def _embedding(self) -> int:
        """The gradients of what is no block, beside what is gathered of it, and then as they are split."""
        network, size = self.network, self.itemsize
        if self.slices == 1:
            numbers = network.trained_rest
            made = size * (numbers + network.trained_embeddings * network.is_tied)  # and those of the head
        else:
            numbers = network.trained_embeddings // self.slices
            made = (MASTER_BYTES + size + size * network.is_tied) * numbers
        return max(made + self._rest("embedding"), self._unsplit(numbers))

    def _unsplit(self, numbers: int) -> int:
        """Return the bytes of gradients that are split over ranks: copied to float32, and then summed, their part."""
        return max(self.itemsize * numbers + MASTER_BYTES * numbers, MASTER_BYTES * (numbers + numbers // self.split))
