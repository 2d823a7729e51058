"""One microbatch's backward without a pipeline: what the executor of a schedule does between two
forwards.
"""

from dolmen.parallel.data import Reduction


def backward(loss, model, last, zero):
    """Gradients cross fsdp with the last microbatch, and with each under ZeRO 2 and 3."""
    Reduction(model, zero, split_backward=False).prepare_backward([model], last, last)
    loss.backward()
