"""Multi-turn completions: the model and an environment (a tool, a user, a game) write in turns.

    prompt | model ... stop | environment | model ... stop | environment | model ...

All turns are one completion. Tokens of the environment are part of the text, and are masked out of
the loss.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from dolmen.core import consensus
from dolmen.core.mesh import Mesh
from dolmen.data.tokenizer import PreTrainedTokenizer
from dolmen.rl.function_worker import FunctionWorker
from dolmen.rl.generation import Completion
from dolmen.rl.prompts import Prompt
from dolmen.rl.rewards import RewardError

Generate = Callable[[Sequence[Sequence[int]], Sequence[str], Sequence[int]], list[Completion]]
"""(token ids, names, maximum new tokens) -> completions."""


class EnvironmentTurn(NamedTuple):
    """The reply of an environment: text that follows the model's turn, the end, or a failure."""

    text: str | None
    """None ends the completion."""
    error: str = ""
    """Why it failed."""


class Environment(Protocol):
    """An environment: called with a prompt and the turns so far, the model's last; returns its
    reply.
    """

    def __call__(self, prompt: Prompt, turns: list[str]) -> EnvironmentTurn:
        """Return the environment's turn."""
        ...


class UserEnvironment:
    """An environment that is MODULE:FUNCTION, called as function(prompt, turns, row) in a worker
    process: `turns` are the texts of model and environment so far, the last is the model's.
    """

    def __init__(self, name: str, timeout: float):
        """`name`: MODULE:FUNCTION. `timeout`: seconds per call. The process starts with the first
        call.
        """
        self.worker = FunctionWorker("turn", name, timeout)

    def __enter__(self) -> "UserEnvironment":
        """Return the environment itself; the worker process starts with the first call."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the worker process."""
        self.worker.stop()

    def __call__(self, prompt: Prompt, turns: list[str]) -> EnvironmentTurn:
        """Call the user's function with the prompt, the texts of all turns so far and the prompt's
        row, and return its turn: a text, or None to end the completion. A failed call ends it, with
        its reason.
        """
        request = {"prompt": prompt.content, "turns": turns, "row": prompt.row}
        reply: dict[str, Any] = self.worker.call(request)
        return EnvironmentTurn(reply.get("turn"), reply.get("failed", ""))


@dataclass(frozen=True, eq=False)
class MultiTurn:
    """Generates completions in turns with an environment."""

    environment: Environment
    tokenizer: PreTrainedTokenizer
    max_turns: int
    """Maximum calls of the environment per completion."""
    stop_on_failure: bool
    """True if a failure of the environment stops the run; else it ends the completion."""
    mesh: Mesh
    say: Callable[[str], None] = print

    def generate(
        self, generate: Generate, prompts: Sequence[Prompt], names: Sequence[str], max_tokens: int
    ) -> tuple[list[Completion], dict[str, float]]:
        """Return a completion of each prompt, in order, and metrics. Model and environment write in
        turns, until the environment ends it, max_turns are reached, or `max_tokens`, its own tokens
        included. Raises RewardError, on every rank, where a failure of the environment stops the
        run.
        """
        completions = generate(
            [prompt.tokens for prompt in prompts], names, [max_tokens] * len(prompts)
        )
        turns = [[self._decode(completion.tokens)] for completion in completions]
        failed = calls = 0
        # a truncated completion has no room for another turn
        active = [completion.prompt_index for completion in completions if completion.finished]
        for number in range(1, self.max_turns + 1):
            replies = self._call_environment([(prompts[i], turns[i]) for i in active])
            failed += sum(bool(reply.error) for reply in replies)
            continued = []
            for i, reply in zip(active, replies, strict=True):
                if reply.text is None:
                    continue
                tokens = self._encode(reply.text)
                completions[i] = completions[i].add_environment_tokens(tokens, max_tokens)
                turns[i].append(reply.text)
                calls += 1
                if completions[i].finished:
                    continued.append(i)
            if not continued:
                break
            # the text so far is the next prompt, token by token: encoding it again could split it
            # otherwise
            texts = [[*prompts[i].tokens, *completions[i].tokens] for i in continued]
            left = [max_tokens - len(completions[i].tokens) for i in continued]
            # a seed of its own for each turn
            new_names = [f"{names[i]}/turn {number}" for i in continued]
            for i, turn in zip(continued, generate(texts, new_names, left), strict=True):
                completions[i] = completions[i].add_turn(turn)
                turns[i].append(self._decode(turn.tokens))
            active = [i for i in continued if completions[i].finished]
        metrics = {"rollout/turns": calls / len(prompts), "rollout/failed_turns": float(failed)}
        return completions, metrics

    def _call_environment(
        self, requests: Sequence[tuple[Prompt, list[str]]]
    ) -> list[EnvironmentTurn]:
        """Call the environment for each (prompt, turns) on the first rank, and return its replies
        on every rank. A failure is a warning and ends the completion, or raises RewardError on
        every rank with `stop_on_failure`.
        """

        def call() -> list[EnvironmentTurn]:
            """Return the replies, up to a failure that stops the run."""
            replies = []
            for prompt, turns in requests:
                replies.append(self.environment(prompt, turns))
                if replies[-1].error and self.stop_on_failure:
                    break
                if replies[-1].error:
                    self.say(f"WARNING: {replies[-1].error}")
            return replies

        replies = call() if self.mesh.size == 1 else consensus.run_on_rank_zero(call)
        for reply in replies:
            if reply.error and self.stop_on_failure:
                raise RewardError(
                    f"{reply.error} (--rollout.on-failure zero or leave-out continues)"
                )
        return replies

    def _decode(self, tokens: list[int]) -> str:
        """Return the text of tokens, without special tokens."""
        return self.tokenizer.decode(tokens, skip_special_tokens=True)

    def _encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without special tokens."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
