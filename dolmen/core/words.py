"""Words for people."""


def counted(count: int, one: str, several: str | None = None) -> str:
    """1, 'process', 'processes' -> '1 process'; 1,200 of it '1,200 processes'. `several` is unset
    where it is `one` with an s.
    """
    return f"{count:,} {one if count == 1 else several or one + 's'}"
