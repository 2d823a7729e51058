"""What judges answers: rules, and functions in a process of their own."""

import pytest
import reward_functions

from dolmen.core.mesh import SINGLE
from dolmen.rl.environment import UserEnvironment
from dolmen.rl.function_worker import check_signature
from dolmen.rl.rewards import (
    CombinedReward,
    RewardInput,
    UserReward,
    WeightedReward,
    is_reward_model,
    last_number,
    make_reward_function,
    parse_rewards,
)


@pytest.fixture(autouse=True)
def named_from_here(monkeypatch):
    """MODULE is looked for in the current folder."""
    monkeypatch.chdir("tests/rl")


def reward(name: str, text: str, **row) -> float | None:
    with make_reward_function(name, 20.0) as judge:
        return judge(RewardInput("?", text, row)).reward


@pytest.mark.parametrize(
    "name, text, row, want",
    [
        ("exact", " Paris\n", {"answer": "Paris"}, 1),
        ("exact", "Paris.", {"answer": "Paris"}, 0),
        ("exact", "7", {"answer": 7}, 1),
        ("regex:^a+$", "aaa", {}, 1),
        ("regex:^a+$", "aab", {}, 0),
        ("gsm8k", "so 3 x 4 = 12. The answer is 1,012.50", {"answer": "x\n#### 1012.5"}, 1),
        ("gsm8k", "12 and then 13", {"answer": "#### 12"}, 0),
        ("gsm8k", "no number", {"answer": "#### 12"}, 0),
        ("stub", "aabb", {}, 0.5),
        ("stub", "", {}, 0),
    ],
)
def test_rules(name, text, row, want):
    assert reward(name, text, **row) == want


def test_the_last_number_is_that_behind_the_mark():
    assert last_number("1 #### 2 and 3") == 3
    assert last_number("-4,200.5!") == -4200.5
    assert last_number("####") is None


def test_a_row_without_what_is_compared_has_failed():
    with make_reward_function("exact", 1.0) as judge:
        found = judge(RewardInput("?", "7", {}))
    assert found.reward is None and "'answer'" in found.error


@pytest.mark.spawn
def test_a_function_judges_in_a_process_of_its_own(capfd):
    assert reward("reward_functions:length", "four", more=0.5) == 4.5
    assert "said by a reward" in capfd.readouterr().out


@pytest.mark.spawn
@pytest.mark.parametrize(
    "name, why",
    [
        ("reward_functions:raises", "RuntimeError: no reward today"),
        ("reward_functions:nothing", "it gave nan"),
        ("reward_functions:leaves", "returned no reward"),
    ],
)
def test_what_gives_no_reward_has_failed(name, why):
    with make_reward_function(name, 20.0) as judge:
        for _ in range(2):  # and the next is judged again
            found = judge(RewardInput("?", "x", {}))
            assert found.reward is None and why in found.error


@pytest.mark.spawn
def test_a_second_reply_to_one_request_is_an_error_and_no_reward():
    """Of a function that forks: the next request would take it for its own."""
    with make_reward_function("reward_functions:forks", 20.0) as judge:
        found = [judge(RewardInput("?", str(number), {})) for number in range(6)]
    wrong = [one for one in found if one.reward is None]
    assert wrong and all("the function forks" in one.error for one in wrong)
    assert all(one.reward in (None, number) for number, one in enumerate(found))


@pytest.mark.spawn
def test_a_reward_is_a_number_and_no_text_or_bool():
    with make_reward_function("reward_functions:value", 20.0) as judge:
        for text, why in (
            ("text", "it returned str, not a number"),
            ("true", "it returned bool, not a number"),
            ("none", "it returned NoneType, not a number"),
            ("list", "it returned list, not a number"),
            ("bool of numpy", "it returned bool"),
            ("large", "OverflowError"),
        ):
            found = judge(RewardInput("?", text, {}))
            assert found.reward is None and why in found.error, text
        given = [
            judge(RewardInput("?", t, {})).reward for t in ("numpy", "integer of numpy", "fraction")
        ]
    assert given == [0.5, 2.0, 0.5]


@pytest.mark.spawn
def test_what_takes_too_long_has_failed_and_what_comes_after_has_not():
    with make_reward_function("reward_functions:hangs", 0.5) as judge:
        said = [judge(RewardInput("?", text, {})).reward for text in ("quick", "slow", "quick")]
    assert said == [1.0, None, 1.0]


@pytest.mark.spawn
@pytest.mark.parametrize(
    "name, why",
    [
        ("reward_functions:absent", "has no function absent"),
        ("reward_functions.py:length", "not a package; write reward_functions:length"),
        (
            "reward_functions:of_trl",
            "of_trl takes lists of completions, like a reward function of TRL",
        ),
        ("reward_functions:NUMBER", "has no function NUMBER"),
        ("no_such_module:f", "cannot be imported"),
        ("no_such_file.py:f", "no_such_file.py:f: no file no_such_file.py in /"),
    ],
)
def test_a_function_that_is_not_there_is_refused(name, why):
    with pytest.raises(ValueError, match=why), make_reward_function(name, 1.0) as judge:
        judge.start()


def accepts_two(prompt, answer):
    return 1.0


def of_trl_without_keywords(prompts, completions, answer):
    return [1.0]


@pytest.mark.parametrize(
    "function, kind, said",
    [
        (
            accepts_two,
            "reward",
            r"function\(prompt, completion, row\): too many positional arguments",
        ),
        (lambda prompt, *, turns, row: None, "turn", r"function\(prompt, turns, row\): "),
        (of_trl_without_keywords, "reward", "takes lists of completions"),
    ],
)
def test_a_function_of_other_arguments_is_refused(function, kind, said):
    with pytest.raises(ValueError, match=said):
        check_signature("m:f", function, kind)


def test_a_function_of_trl_is_called_as_the_message_says():
    with pytest.raises(ValueError) as refusal:
        check_signature("reward_functions:of_trl", reward_functions.of_trl, "reward")
    call = str(refusal.value).partition("returns ")[2]
    names = {"prompt": "p", "completion": "four", "row": {"prompt": "p", "more": 0.5}}
    assert eval(call, {"of_trl": reward_functions.of_trl, **names}) == 4.5
    for function in (reward_functions.length, lambda *_: 1.0, min):  # of min nothing is known
        check_signature("m:f", function, "reward")


@pytest.mark.parametrize("name", ["exakt", "a b:c", "reward_functions:", "regex:("])
def test_what_names_no_reward_is_refused(name):
    with pytest.raises(ValueError, match="reward"):
        make_reward_function(name, 1.0)


def test_weights_are_spelled_as_those_of_data():
    arguments = ["0.7:gsm8k", "regex:^a:b", "2:reward_functions:length", ".5:runs/reward"]
    names = ["gsm8k", "regex:^a:b", "reward_functions:length", "runs/reward"]
    assert parse_rewards(arguments) == list(zip((0.7, 1, 2, 0.5), names, strict=True))
    for arguments in ("0:exact", "1:", f"{10**16}:exact", f"{'9' * 400}:exact"):
        with pytest.raises(ValueError, match="must be over 0 and at most 1e[+]15"):
            parse_rewards([arguments])


def test_a_folder_is_a_reward_model(tmp_path):
    assert is_reward_model(str(tmp_path)) and is_reward_model("org/name")
    assert not any(map(is_reward_model, ["exact", "regex:a/b", "reward_functions:length"]))


def test_leaving_stops_every_process():
    """Of an environment, of a reward, and of all rewards together, though stopping one fails."""
    stopped = []

    def noted(made, name, error=None):
        def stop():
            stopped.append(name)
            if error is not None:
                raise error

        made.worker.stop = stop
        return made

    names = ("reward_functions:length", "reward_functions:nothing")
    first, second = (noted(UserReward(name, 1.0), name, OSError(name)) for name in names)
    with noted(UserEnvironment("reward_functions:length", 1.0), "environment"):
        assert not stopped
    parts = [
        WeightedReward(name, 1.0, made) for name, made in zip(names, (first, second), strict=True)
    ]
    with pytest.raises(OSError, match="reward_functions"), CombinedReward(parts, "zero", SINGLE):
        assert stopped == ["environment"]
    assert sorted(stopped[1:]) == sorted(names)
