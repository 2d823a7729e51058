"""The backend of cuDNN's attention on Hopper and Blackwell: FlashAttention-2's (flash.py), but that
whole sequences and whole chunks without documents or a window are computed by cuDNN's operators
(operators.py says which calls fit).
"""

from dolmen.ops.attention import flash
from dolmen.ops.attention.spec import Attend, Attended, Keys, LogSum, Place, Queries, Values


def attention(q: Queries, k: Keys, v: Values, attend: Attend, later: int = 0) -> Attended:
    """See `spec.Attention`; `later` is 0, as there are no prefixes."""
    return flash.attention(q, k, v, attend, later, cudnn=True)


def partial(q: Queries, k: Keys, v: Values, at: Place) -> tuple[Attended, LogSum]:
    """See `spec.Attention`."""
    return flash.partial(q, k, v, at, cudnn=True)


def partial_backward(
    g: Attended, q: Queries, k: Keys, v: Values, whole: tuple[Attended, LogSum], at: Place
) -> tuple[Queries, Keys, Values]:
    """See `spec.Attention`; dk and dv in fp32."""
    return flash.partial_backward(g, q, k, v, whole, at, cudnn=True)
