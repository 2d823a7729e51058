"""What is common to the arrangements in which mixer and mlp come one after the other, each between
norms of its own: all but `Parallel`.
"""


class InTurn:
    @property
    def norms(self) -> int:
        """How many norms a block has."""
        return 2

    @property
    def streams(self) -> int:
        """Tensors as wide as the residual stream that backward needs of a block: what norms and
        columns were given.
        """
        return 2 + self.norms

    @property
    def additions(self) -> int:
        """How often something is added to the residual stream, each time with a dropout of its
        own.
        """
        return 2
