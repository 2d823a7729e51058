"""Slopes of ALiBi (Press et al., 2108.12409)."""


def slopes(heads: int) -> tuple[float, ...]:
    """Of each head, as the paper's code, BLOOM and Falcon have them: 2^(-8/n), 2^(-16/n), ..., 2^-8
    where n = heads is a power of two. Else those of the next lower n, and after them the first,
    third, fifth, ... of 2 n, between which n's own lie.
    """
    n = 1 << (heads.bit_length() - 1)
    return (
        *(2 ** (-8 * i / n) for i in range(1, n + 1)),
        *(2 ** (-4 * i / n) for i in range(1, 2 * (heads - n), 2)),
    )
