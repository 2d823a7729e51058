"""What torch and CUDA read from the environment as they start, set once at the entry point, of
launchers and workers alike. What the user has set stays.
"""

from collections.abc import MutableMapping

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"


def set_defaults(env: MutableMapping[str, str]) -> None:
    """Set what the user has not. Before CUDA starts."""
    # Segments that grow: gathered parameters and activations of many sizes otherwise leave gaps
    # that no later tensor fits. torch 2.11 to 2.15 read the first name; the others are older ones
    # for the same.
    if not any(name in env for name in ALLOCATOR):
        env[ALLOCATOR[0]] = "expandable_segments:True"
    # Hardware queues. Streams that share one wait for each other, so that a receive whose peer has
    # not sent yet would hold up a send, or a product, that the peer waits for. A rank of every axis
    # has some 17 streams: compute, four of FSDP, copies, and one for each of eleven communicators.
    # CUDA's default is 8 queues, its most 32.
    env.setdefault(QUEUES, "32")
