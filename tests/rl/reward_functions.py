"""Rewards and environments that tests name as MODULE:FUNCTION."""

import os
import time
from fractions import Fraction

import numpy as np


def length(prompt, answer, row):
    print("said by a reward")  # which is no reply
    return len(answer) + row["more"]


def of_trl(prompts, completions, **kwargs):
    """As TRL calls its reward functions: a list of each column."""
    return [len(text) + more for text, more in zip(completions, kwargs["more"], strict=True)]


def raises(prompt, answer, row):
    raise RuntimeError("no reward today")


def hangs(prompt, answer, row):
    if answer == "slow":
        time.sleep(60)
    return 1.0


def nothing(prompt, answer, row):
    return float("nan")


VALUES = {
    "text": "0.5",
    "true": True,
    "none": None,
    "list": [1.0],
    "bool of numpy": np.True_,
    "numpy": np.float32(0.5),
    "integer of numpy": np.int64(2),
    "fraction": Fraction(1, 2),
    "large": 10**400,
}


def value(prompt, answer, row):
    return VALUES[answer]


def forks(prompt, answer, row):
    """Returns in two processes, each of which replies."""
    os.fork()
    return float(answer)


def leaves(prompt, answer, row):
    os._exit(3)


NUMBER = 7


def calculator(prompt, turns, row):
    """The value of the model's sum, twice at most."""
    if len(turns) > 4:
        return None
    return f" = {sum(map(int, turns[-1].split('+')))}; "


def says_a_number(prompt, turns, row):
    return 7


def says_half_a_character(prompt, turns, row):
    if turns == ["raise"]:
        raise ValueError("\ud800")
    return "é\ud800"
