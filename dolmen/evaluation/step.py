"""What two programs of a model are asked of random tokens: a batch, and the loss that it is judged
by, which are those of pretraining.
"""

import numpy as np
import torch
from jaxtyping import Int64

from dolmen.data.batch import FOLLOWS, Batch
from dolmen.model.tree import Tree
from dolmen.objectives.filling import Filling
from dolmen.objectives.objective import CrossEntropy, Objective


def batch_of(tree: Tree, windows: Int64[np.ndarray, "sequences window"]) -> Batch:
    """Of tokens and one more of each sequence: next tokens are to be said, or, by an encoder, the
    tokens themselves, and of every second sequence that its second text follows the first.
    """
    if not tree.both_ways:
        return Batch.of_windows(windows)
    tokens = torch.from_numpy(np.ascontiguousarray(windows[:, :-1]))
    if not judges_pairs(tree):
        return Batch(tokens, tokens)
    follows = torch.zeros(tokens.shape)
    follows[0::2, 0], follows[1::2, 0] = 1.0, -1.0
    return Batch(tokens, tokens, numbers={FOLLOWS: follows})


def objective_of(tree: Tree, batch: Batch) -> Objective:
    """Of all tokens and, once per sequence, of pairs: the sum of two means, as transformers has
    it.
    """
    if not judges_pairs(tree):
        return CrossEntropy()
    return Filling(follows=batch.weight / len(batch.tokens))


def judges_pairs(tree: Tree) -> bool:
    """Whether the head says of two texts that the second follows."""
    return tree.both_ways and tree.head.follows
