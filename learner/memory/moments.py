"""Adds up what a network needs for one micro-batch at each moment of the backward pass that may be the fullest.

    logits       the output head: all activations are there, logits, and the gradient of the head
    last block   where the backward pass of the blocks begins: all activations, and what a block's pass makes
    first block  where it ends: the activations of one block, and the gradients of all others
    embedding    the gradients of embeddings and of what else is no block, until they are split over the ranks

FSDP2 shards each block by itself and all the rest, the root, together: the root is gathered in the whole pass, and its
gradients are split when the pass is over. With learner.sequence_parallel embeddings and head are units of their own:
each is gathered only while it computes, and the head's gradient is split before the blocks' are computed, unless both
are the same tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

from learner.memory.networks import NetworkSizes
from learner.memory.optimizer_state import MASTER_BYTES
from learner.memory.passes import PassMemory
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
        return self._blocks + max(self._rest(moment) for moment in ("logits", "first block", "embedding"))

    @property
    def scores(self) -> int:
        """Logits and the gradient of the head; see token_scores.py and split_vocabulary.py.

        A chunk's part of that gradient, where it is added to a sum, comes when nothing but the gradient of the logits,
        in the compute type, is left of them.
        """
        network, size = self.network, self.itemsize
        if not network.has.head:
            return 0
        limit = token_scores.LOGITS_BYTES[self.device_type]
        wanted, is_narrow = 4 * self.tokens * -(-network.config.vocab_size // self.slices), size < MASTER_BYTES
        logits, head = min(wanted, limit), network.trains.head // self.slices
        is_added = self.slices > 1 or (is_narrow and wanted > limit)
        made = round(logits * (1.5 if is_narrow else 1.3))
        return head * (MASTER_BYTES if is_added else size) + max(made, logits * size // 4 + head * size * is_added)

    def at_each(self) -> dict[str, float]:
        """Return the bytes at each moment."""
        network = self.network
        of_block = self.rows * (self.passes.peak - self.passes.kept) + self._unsplit(network.trains.block)
        if self._waits:  # the gradient of the head, whole, until the pass is over
            of_block += self.itemsize * network.trains.head // self.slices
        loss = {
            "logits": self.kept + self.scores, "last block": self.kept + of_block,
            "first block": self.kept / max(1, network.layers) + of_block, "embedding": self._embedding,
        }
        rest = {name: 0 if name == "embedding" else self._rest(name) for name in loss}
        return {name: size + self._blocks + rest[name] + self._gradients(name) for name, size in loss.items()}

    @property
    def _waits(self) -> bool:
        """Whether the head stays gathered and its gradient whole in the whole pass."""
        return self.slices == 1 or self.network.is_tied

    @property
    def _blocks(self) -> int:
        """The bytes of gathered blocks: the one that computes, and the next one, flat and taken apart."""
        return self.itemsize * self.network.has.block * (1 if self.split == 1 else 3)

    def _rest(self, moment: str) -> int:
        """Return the gathered weights of what is no block."""
        has, is_tied = self.network.has, self.network.is_tied
        if self.slices == 1:
            return self.itemsize * has.rest
        numbers = has.rest - has.embeddings - (0 if is_tied else has.head)  # the root
        if is_tied or moment == "embedding":
            numbers += has.embeddings // self.slices
        elif moment == "logits":
            numbers += has.head // self.slices
        return self.itemsize * numbers

    def _gradients(self, moment: str) -> int:
        """Return the gradients that are split over the ranks already."""
        trains, numbers = self.network.trains, 0
        if not self.keeps_gradients:
            return 0
        if not self.is_first:
            return MASTER_BYTES * trains.all // self.split
        if moment != "logits" and not self._waits:
            numbers += trains.head
        if moment in ("first block", "embedding"):
            numbers += trains.all - trains.rest
        return MASTER_BYTES * numbers // self.split

    @property
    def _embedding(self) -> int:
        """The gradients of what is no block, with what is gathered of it, and then as they are split."""
        trains, is_tied, size = self.network.trains, self.network.is_tied, self.itemsize
        if self.slices == 1:
            numbers = trains.rest
            made = size * (numbers + trains.embeddings * is_tied)  # and those of the head
        else:
            numbers = trains.embeddings // self.slices
            made = (MASTER_BYTES + size + size * is_tied) * numbers
        return max(made + self._rest("embedding"), self._unsplit(numbers))

    def _unsplit(self, numbers: int) -> int:
        """Return the bytes of gradients that are split over ranks: copied to float32, and then summed, their part."""
        return max(self.itemsize * numbers + MASTER_BYTES * numbers, MASTER_BYTES * (numbers + numbers // self.split))
