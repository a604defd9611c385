"""Adds up what a network needs for one micro-batch at each moment of the backward pass that may be the fullest.

    logits       the output head: all activations, logits, and the gradient of the head
    last block   the first of the backward pass: all activations, and what the pass of a block makes
    first block  the last of the backward pass: the activations of one block, and the gradients of all others
    embedding    the gradients of embeddings and of all that is no block, until they are split over the ranks

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
    """The bytes of one network's backward pass over a micro-batch on one rank.

    Weights as they are held, optimizer state and other networks are not counted.
    """

    network: NetworkSizes
    passes: PassMemory
    rows: int
    """The rows of a micro-batch of full length."""
    tokens: int
    """This rank's tokens of the micro-batch."""
    device_type: str
    itemsize: int
    """The bytes of a number of the compute type."""
    split: int
    """The number of ranks that weights are split over."""
    slices: int
    """The number of these ranks that a row, the output head and the embeddings are split over."""
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
        return self._rest("last block") if self._waits else 0

    @property
    def gathered(self) -> int:
        """The most weights in the compute type at a time: one to three blocks, and what is no block."""
        return self._blocks + max(self._rest(moment) for moment in ("logits", "first block", "embedding"))

    @property
    def scores(self) -> int:
        """Logits and the gradient of the head; see token_scores.py and split_vocabulary.py.

        If a chunk's part of that gradient is added to a sum, it comes when only the gradient of the logits, in the
        compute type, is left of them.
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
        network, trains = self.network, self.network.trains
        of_block = self.rows * (self.passes.peak - self.passes.kept) + self._unsplit(trains.block)
        if self._waits:  # the gradient of the head, whole, until the pass is over
            of_block += self.itemsize * trains.head // self.slices
        head, blocks = 0 if self._waits else trains.head, trains.all - trains.rest
        moments = {  # what only the pass makes, and numbers of the gradients that are split already
            "logits": (self.kept + self.scores + self._rest("logits"), 0),
            "last block": (self.kept + of_block + self._rest("last block"), head),
            "first block": (self.kept / max(1, network.layers) + of_block + self._rest("first block"), head + blocks),
            "embedding": (self._embedding, head + blocks),
        }
        return {
            name: size + self._blocks
            + MASTER_BYTES * ((split if self.is_first else trains.all) if self.keeps_gradients else 0) // self.split
            for name, (size, split) in moments.items()
        }

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
