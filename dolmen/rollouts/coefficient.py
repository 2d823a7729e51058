"""The coefficient of the KL in rewards, which may hold that KL at a target."""

MOST = 0.2  # of the target, that a phase's KL is taken to be off (1909.08593, section 2.2)


class Coefficient:
    """Of the KL in rewards, and how it moves (1909.08593, section 2.2; TRL's and verl's
    AdaptiveKLController): after a phase of n answers with a mean KL per answer of d,

        value (1 + clip((d - target) / target, -0.2, 0.2) n / horizon)
    """

    def __init__(self, value: float, target: float | None, horizon: float):
        self.value, self.target, self.horizon = value, target, horizon

    def after(self, used: float, kl: float, answers: int) -> float:
        """What it is once a phase with the value `used` has had that KL."""
        if self.target is None:
            return self.value
        off = max(-MOST, min(MOST, (kl - self.target) / self.target))
        return used * (1 + off * answers / self.horizon)
