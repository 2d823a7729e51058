"""A process group in which nothing is sent: one process plays any rank of any world."""

from dolmen.core.torch_private.dispatch import join_fake

__all__ = ["join_fake"]
