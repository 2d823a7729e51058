"""Answers in turns with an environment."""

from dataclasses import replace

import pytest
import torch

from dolmen.core.mesh import SINGLE
from dolmen.ops.loss import IGNORED
from dolmen.rl.config import RolloutConfig
from dolmen.rl.environment import EnvironmentTurn, MultiTurn, UserEnvironment
from dolmen.rl.generation import Completion
from dolmen.rl.prompts import Prompt
from dolmen.rl.rewards import RewardError
from dolmen.rl.rollout import make_rollout
from dolmen.rl.targets import compute_advantages

END = 0


class Letters:
    """A tokenizer of characters, whose END is special."""

    def decode(self, tokens, skip_special_tokens):
        return "".join(chr(token) for token in tokens if token != END)

    def __call__(self, text, add_special_tokens):
        return {"input_ids": [ord(char) for char in text]}


def ids(text: str) -> list[int]:
    return [END if char == "." else ord(char) for char in text]


def model(*said: dict[str, str]):
    """One that says, in each turn, to each text what is said here; "." ends a turn."""
    given = []

    def draw(texts, names, most):
        given.append(
            [(Letters().decode(text, True), name) for text, name in zip(texts, names, strict=True)]
        )
        found = []
        for i, (text, room) in enumerate(zip(texts, most, strict=True)):
            tokens = ids(said[len(given) - 1][Letters().decode(text, True)])[:room]
            logprobs = [-0.1 * (n + 1) for n in range(len(tokens))]
            own = [True] * len(tokens)
            found.append(Completion(i, tokens, logprobs, own, tokens[-1] == END))
        return found

    return draw, given


def of(environment, most=8, stop=True) -> MultiTurn:
    return MultiTurn(environment, Letters(), most, stop, SINGLE, lambda line: None)  # pyright: ignore


PROMPTS = [Prompt(ids(text), {"prompt": text}, text) for text in ("a", "b", "c")]
NAMES = ["0/0", "0/1", "0/2"]


def adds(prompt, turns):
    if "+" not in turns[-1]:
        return EnvironmentTurn(None)
    return EnvironmentTurn(f"={sum(map(int, turns[-1].split('+')))};")


def test_an_environment_is_asked_until_it_has_nothing_to_say():
    """Of one twice, of one once, of one that is cut never."""
    draw, given = model(
        {"a": "1+2.", "b": "4+4.", "c": "1+1+1+1+1+1+1+1"},
        {"a1+2=3;": "3+9.", "b4+4=8;": "8."},
        {"a1+2=3;3+9=12;": "12."},
    )
    found, metrics = of(adds).generate(draw, PROMPTS, NAMES, 20)
    assert [one.tokens for one in found] == [
        ids("1+2.=3;3+9.=12;12."),
        ids("4+4.=8;8."),
        ids("1+1+1+1+1+1+1+1"),
    ]
    assert [one.finished for one in found] == [True, True, False]
    own = "".join("x" if one else "-" for one in found[0].sampled)
    assert own == "xxxx---xxxx----xxx"
    assert found[1].logprobs == pytest.approx([-0.1, -0.2, -0.3, -0.4, 0, 0, 0, -0.1, -0.2])
    assert metrics == {"rollout/turns": 1.0, "rollout/failed_turns": 0.0}
    assert [name for _, name in given[1]] == ["0/0/turn 1", "0/1/turn 1"]
    assert [name for _, name in given[2]] == ["0/0/turn 2"]


def test_turns_and_tokens_are_bounded():
    draw, given = model({"a": "1+2."}, {"a1+2=3;": "3+9."}, {"a1+2=3;3+9=12;": "1+1."})
    assert of(adds, most=1).generate(draw, PROMPTS[:1], NAMES[:1], 20)[0][0].finished
    assert len(given) == 2
    draw, given = model({"a": "1+2."}, {"a1+2=3;": "3+9."})
    (cut,), _ = of(adds).generate(draw, PROMPTS[:1], NAMES[:1], 15)
    assert cut.tokens == ids("1+2.=3;3+9.") and not cut.finished  # "=12;" and one more are 16


def test_what_the_environment_says_is_not_learned_from():
    """No loss, and no advantage; KL in the reward is of the model's own tokens alone."""
    draw, _ = model({"a": "1+2.", "b": "4."}, {"a1+2=3;": "8."})
    found, _ = of(adds).generate(draw, PROMPTS[:2], NAMES[:2], 20)
    made = make_rollout(
        [one.tokens for one in PROMPTS[:2]],
        [one.tokens for one in found],
        [one.logprobs for one in found],
        32,
        2,
        [one.sampled for one in found],
    )
    here = made.labels != IGNORED
    assert here[0].tolist()[:9] == [True] * 4 + [False] * 3 + [True] * 2
    assert made.labels[here].tolist() == ids("1+2.8.4.")
    assert made.tokens[0].tolist()[:9] == ids("a1+2.=3;8")
    made = replace(made, rewards=torch.tensor([1.0, 0.0]), old_logprobs=made.sampled_logprobs)
    made = replace(made, reference_logprobs=torch.full_like(made.old_logprobs, 99.0))
    config = RolloutConfig(num_generations=2, advantage_estimator="rloo", reward_kl_coef=1.0)
    found = compute_advantages(made, config).advantages
    assert not found[~here].any()
    kl = (made.old_logprobs - 99.0)[here & (torch.arange(2) == 0)[:, None]].sum()
    other = (made.old_logprobs - 99.0)[here & (torch.arange(2) == 1)[:, None]].sum()
    assert float(found[0, 0]) == pytest.approx(float(1 - kl + other), rel=1e-5)


def test_an_environment_that_fails_ends_the_run_or_the_answer():
    def fails(prompt, turns):
        return (
            EnvironmentTurn(None, "it broke") if prompt.location == "a" else EnvironmentTurn(None)
        )

    said = {"a": "1.", "b": "2.", "c": "3."}
    with pytest.raises(RewardError, match="it broke .--rollout.on-failure"):
        of(fails).generate(model(said)[0], PROMPTS, NAMES, 20)
    found, metrics = of(fails, stop=False).generate(model(said)[0], PROMPTS, NAMES, 20)
    assert [one.tokens for one in found] == [ids("1."), ids("2."), ids("3.")]
    assert metrics["rollout/failed_turns"] == 1


@pytest.mark.spawn
def test_an_environment_is_a_process_of_its_own(monkeypatch):
    monkeypatch.chdir("tests/rl")
    prompt = PROMPTS[0]
    with UserEnvironment("reward_functions:calculator", 20.0) as environment:
        assert environment(prompt, ["1+2"]) == EnvironmentTurn(" = 3; ")
        assert environment(prompt, ["1", "2", "3", "4", "5"]) == EnvironmentTurn(None)
        assert environment(prompt, ["x"]).error.startswith(
            "reward_functions:calculator: ValueError"
        )
    with UserEnvironment("reward_functions:says_a_number", 20.0) as environment:
        assert "it returned int, not text or None" in environment(prompt, ["x"]).error
    with UserEnvironment("reward_functions:says_half_a_character", 20.0) as environment:
        assert "it returned a lone surrogate" in environment(prompt, ["x"]).error
        assert environment(prompt, ["raise"]).error.endswith(r"ValueError: \ud800")  # to be printed
    with pytest.raises(ValueError, match="reward_functions has no function absent"):
        UserEnvironment("reward_functions:absent", 20.0)(prompt, ["x"])
