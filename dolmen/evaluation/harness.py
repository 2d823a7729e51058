"""Runs tasks of lm_eval on a model: the only module that imports lm_eval, an extra.

    task -> lm_eval -> requests -> Harness -> perplexity.py   log-likelihoods, under any layout
                                           -> engine          completions up to a stop string

Every rank runs lm_eval on all requests; each batch is divided over the ranks.
Text becomes tokens, and is cut, as lm_eval's own `hf` backend does it, so that numbers compare.
"""

import contextlib
import io
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from lm_eval.api.model import TemplateLM
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from dolmen.core import consensus
from dolmen.core.messages import did_you_mean
from dolmen.data.tokenizer import PreTrainedTokenizer
from dolmen.evaluation import model, perplexity
from dolmen.evaluation.config import TasksConfig
from dolmen.evaluation.model import Loaded
from dolmen.serving.request import SamplingParams

NEW_TOKENS = 256  # of a completion, where the task has no max_gen_toks; the default of `hf`

Pair = tuple[Any, list[int], list[int]]
"""Request of lm_eval: its key, the context's tokens, and the tokens to score."""


class Harness(TemplateLM):
    """lm_eval's model interface over a model that is loaded here. Every rank runs lm_eval with all
    requests; each batch is divided over ranks.
    """

    backend = "causal"

    def __init__(self, loaded: Loaded, tokenizer: PreTrainedTokenizer):
        """Evaluate `loaded` with its tokenizer, at most max_position_embeddings tokens at a
        time.
        """
        super().__init__()
        self.loaded = loaded
        # Any: methods beyond the PreTrainedTokenizer protocol are called
        self.tokenizer: Any = tokenizer
        self.max_length = loaded.model.spec.max_position_embeddings

    @property
    def eot_token_id(self) -> int:
        """Id of the tokenizer's EOS token, at which generation stops."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """Id of the token in front of a text without context: BOS, else EOS."""
        begin = self.tokenizer.bos_token_id
        return self.tokenizer.eos_token_id if begin is None else begin

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer's name or path, without slashes, by which lm_eval names its cache files."""
        return self.tokenizer.name_or_path.replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Return the token ids of a text. `add_special_tokens` None: as the tokenizer does by
        default, but no special tokens if the text begins with BOS already.
        """
        # chat templates write BOS themselves: it must not be doubled
        has_prefix = string.startswith(self.tokenizer.decode(self.prefix_token_id))
        if add_special_tokens is None and not has_prefix:
            return self.tokenizer.encode(string)
        return self.tokenizer.encode(string, add_special_tokens=bool(add_special_tokens))

    def loglikelihood(self, requests: Any, disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Return, for each request (context, continuation), the sum of the continuation's
        log-probabilities in nats, and whether greedy decoding gives it. No progress bar, whatever
        `disable_tqdm` is.
        """
        return super().loglikelihood(requests, disable_tqdm=True)

    def _loglikelihood_tokens(self, requests: Sequence[Pair], **_: Any) -> list[tuple[float, bool]]:
        """Return, for each request (key, context token ids, continuation token ids), what
        `loglikelihood` does. Contexts are cut on the left to the model's length. Raises ValueError
        for a continuation that is empty or longer than the model.
        """
        if not requests:
            return []
        sequences, firsts = [], []
        for _, context, continuation in requests:
            if not 1 <= len(continuation) <= self.max_length:
                raise ValueError(
                    f"a task asks for {len(continuation):,} tokens to be scored at once, but the "
                    f"model's max_position_embeddings is {self.max_length:,}: use another task"
                )
            # one more than the model reads: the last token is only predicted
            text = (context + continuation)[-(self.max_length + 1) :]
            sequences.append(np.array(text, np.int64))
            firsts.append(len(text) - len(continuation))
        lengths = np.array([len(text) for text in sequences])
        rows = perplexity.ScoringRows(lengths, np.array(firsts), sequences.__getitem__)
        loaded = self.loaded
        row_scores = perplexity.score_rows(loaded.model, rows, loaded.mesh, loaded.schedule)
        # all scored tokens are the argmax
        greedy = row_scores.correct == lengths - np.array(firsts)
        return list(zip(row_scores.log_likelihoods.tolist(), greedy.tolist(), strict=True))

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = True) -> list[float]:
        """Return, for each request, the log-probability in nats of its whole text, computed in
        disjoint windows of the model's length. No progress bar, whatever `disable_tqdm` is.
        """
        numbers, windows = [], []
        for number, request in enumerate(requests):
            (text,) = request.args
            for window in get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            ):
                numbers.append(number)
                windows.append((None, *make_disjoint_window(window)))
        sums = [0.0] * len(requests)
        for number, (score, _) in zip(numbers, self._loglikelihood_tokens(windows), strict=True):
            sums[number] += score
        return sums

    def generate_until(self, requests: Any, disable_tqdm: bool = True) -> list[str]:
        """Return a completion for each request (context, options), in order; requests with equal
        options run in one batch. The stop strings are not part of the results. No progress bar.
        """
        completions = [""] * len(requests)
        batches: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            # options are dicts, which cannot be keys
            batches.setdefault(repr(request.args[1]), []).append(number)
        for numbers in batches.values():
            contexts = [requests[number].args[0] for number in numbers]
            options = normalize_gen_kwargs(requests[numbers[0]].args[1], NEW_TOKENS)
            for number, text in zip(numbers, self._generate(contexts, dict(options)), strict=True):
                completions[number] = text
        return completions

    def _generate(self, contexts: list[str], options: dict[str, Any]) -> list[str]:
        """Return completions of `contexts`, generated with one set of lm_eval's options. Contexts
        are cut on the left so that the new tokens fit. Raises ValueError where the new tokens leave
        no place for a context.
        """
        until = handle_stop_sequences(options["until"], self.tokenizer.decode(self.eot_token_id))
        # tokens of context that leave room for the completion
        most = self.max_length - options["max_gen_toks"]
        if most < 1:
            raise ValueError(
                f"a task asks for {options['max_gen_toks']:,} new tokens, but the model's "
                f"max_position_embeddings is {self.max_length:,}: give a task with a smaller "
                "max_gen_toks"
            )
        sampling = SamplingParams(
            options.get("temperature", 0.0),
            options.get("top_k"),
            options.get("top_p"),
            max_new_tokens=options["max_gen_toks"],
            stop=(self.eot_token_id,),
        )
        prompts = [self.tok_encode(text)[-most:] for text in contexts]
        # an empty stop string would stop at once
        until = [text for text in until if text]
        return model.generate_texts(self.loaded, self.tokenizer, prompts, sampling, until)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return the chat rendered as text with the tokenizer's template; without
        `add_generation_prompt` the last message is left open to be continued.
        """
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )


def load_task_manager(config: TasksConfig) -> TaskManager:
    """Return lm_eval's task manager: of --tasks-path alone if that has all requested tasks
    (faster), else with lm_eval's own tasks too. Raises ValueError for an unknown task.
    """
    manager = TaskManager(include_path=config.tasks_path, include_defaults=False)
    if config.tasks_path is not None and all(name in manager.all_tasks for name in config.names):
        return manager
    # reads thousands of YAML files: seconds
    task_manager = TaskManager(include_path=config.tasks_path)
    for name in config.names:
        if name not in task_manager.all_tasks:
            meant = did_you_mean(name, task_manager.all_tasks, "give its folder as --tasks-path")
            raise ValueError(f"--tasks: lm_eval knows no task {name}: {meant}")
    return task_manager


def scores(
    loaded: Loaded, tokenizer: PreTrainedTokenizer, config: TasksConfig
) -> dict[str, dict[str, float]]:
    """Run the configured lm_eval tasks on a loaded model and return task -> metric, as lm_eval
    names both (`acc,none`) -> value. Collective; equal on every rank. Global random states are
    restored afterwards. Raises ValueError for an unknown task.
    """
    manager = load_task_manager(config)
    harness, names = Harness(loaded, tokenizer), list[Any](config.names)
    # lm_eval seeds the global generators and prints tables
    with preserve_random_state(), contextlib.redirect_stderr(io.StringIO()):
        results = simple_evaluate(
            model=harness,
            tasks=names,
            num_fewshot=config.num_fewshot,
            limit=config.limit,
            apply_chat_template=config.apply_chat_template,
            task_manager=manager,
            log_samples=False,
            bootstrap_iters=0,  # a pool of processes would fork this one
        )
    # lm_eval gives them to the first process of a host alone
    if loaded.mesh.size == 1:
        return _numbers(results)
    return consensus.run_on_rank_zero(lambda: _numbers(results))


def _numbers(results: Any) -> dict[str, dict[str, float]]:
    """Return task -> metric -> value for the numeric metrics in lm_eval's results."""
    return {
        task: {
            name: float(value)
            for name, value in numbers.items()
            if isinstance(value, (int, float)) and "," in name
        }
        for task, numbers in results["results"].items()
    }


@contextlib.contextmanager
def preserve_random_state() -> Iterator[None]:
    """Context manager that restores the global random states of random, numpy and torch."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])
