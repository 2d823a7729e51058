"""What of two answers to a prompt is trained on, and how that is told. Two consecutive examples are
a pair, the chosen answer and the rejected one.
"""

from dataclasses import replace

import numpy as np

from dolmen.core.messages import plural
from dolmen.data.batch import MARGIN, SIDE
from dolmen.data.examples import Examples
from dolmen.data.packing import Rows, Say


def pairs_of(
    examples: Examples, pairs: np.ndarray, sequence_length: int, packing: bool, say: Say, seed: int
) -> Rows:
    """Rows of these pairs, the answers of each in two that are side by side."""
    both = np.stack((2 * pairs, 2 * pairs + 1), 1).reshape(-1)
    said = {SIDE: np.tile(np.array([1, -1], np.float32), len(examples) // 2)}
    if examples.said.any():
        said[MARGIN] = examples.said
    return Rows(
        examples,
        both,
        sequence_length,
        packing=packing,
        together=2,
        say=say,
        seed=seed,
        said=said,
    )


def completions_of(
    examples: Examples, chosen: np.ndarray, sequence_length: int, packing: bool, seed: int
) -> Rows:
    """Rows of these answers, which are wanted or not, and beside each one that answers another
    prompt: the prompt of the example with the answer of the next. Raises ValueError for a single
    answer.
    """
    if len(chosen) == 1:
        raise ValueError(
            f"{examples.name}: one completion is left, and KTO compares answers with those to "
            "other prompts: give more"
        )
    whole = with_unrelated(examples, chosen)
    both = np.stack((chosen, len(examples) + np.arange(len(chosen))), 1).reshape(-1)
    said = {SIDE: whole.said}
    return Rows(whole, both, sequence_length, packing=packing, together=2, seed=seed, said=said)


def with_unrelated(examples: Examples, chosen: np.ndarray) -> Examples:
    """The same examples, and behind them for each chosen one its prompt with the answer of the one
    that is chosen next.
    """

    def parts(index: int) -> tuple[np.ndarray, np.ndarray, int]:
        span = examples.span(index)
        trained = examples.trained[span]
        return examples.tokens[span], trained, int(np.argmax(trained > 0))

    tokens, marks = [examples.tokens], [examples.trained]
    for index, other in zip(chosen, np.roll(chosen, -1), strict=True):
        (own, told, first), (theirs, said, begin) = parts(int(index)), parts(int(other))
        tokens.append(np.concatenate((own[:first], theirs[begin:])))
        marks.append(np.concatenate((told[:first], said[begin:])))
    ends = examples.offsets[-1] + np.cumsum([len(one) for one in tokens[1:]], dtype=np.int64)
    count = len(chosen)
    return replace(
        examples,
        tokens=np.concatenate(tokens),
        trained=np.concatenate(marks),
        offsets=np.concatenate((examples.offsets, ends)),
        weights=np.concatenate((examples.weights, np.ones(count, np.float32))),
        hashes=np.concatenate((examples.hashes, np.zeros(count, np.uint64))),
        said=np.concatenate((examples.said, np.zeros(count, np.float32))),
    )


def useful(examples: Examples, say: Say) -> np.ndarray:
    """Of each pair, whether it says anything: two answers that differ, with a token each; where a
    number is said of the end, two whose ends are read.
    """
    each = examples.predictions() > 0
    if say == "end":
        each = each & ~examples.long
    return each.reshape(-1, 2).all(1) & ~equal(examples)


def equal(examples: Examples) -> np.ndarray:
    """Of each pair, whether its answers are."""
    return examples.hashes[0::2] == examples.hashes[1::2]


def describe_pairs(mixture: Rows) -> list[str]:
    """Describe the pairs that are trained on, then what is left out or cut off."""
    examples, count = mixture.examples, len(mixture.examples) // 2
    of = "tokens of answers" if mixture.say == "next" else "answers, by their last token"
    lines = [
        f"{examples.name}: {plural(len(mixture.chosen) // 2, 'pair')} of answers to train on of "
        f"{count:,}, {mixture.tokens:,} {of}, {plural(len(mixture.rows), 'sequence')} of "
        f"{mixture.sequence_length} per epoch, {mixture.full:.1%} full"
    ]
    if same := int(equal(examples).sum()):
        lines.append(f"left out: {plural(same, 'pair')} whose answers are equal")
    long = int((examples.long.reshape(-1, 2).any(1) & ~equal(examples)).sum())
    if long and mixture.say == "end":
        lines.append(
            f"left out: {plural(long, 'pair')} with an answer that ends behind "
            f"{examples.longest:,} tokens (--train.sequence-length)"
        )
    elif long:
        lines.append(
            f"the ends of answers of {plural(long, 'pair')} of over {examples.longest:,} tokens "
            "are cut off (--train.sequence-length)"
        )
    return lines


def describe_completions(mixture: Rows) -> str:
    """Describe the completions, wanted or not, that are trained on."""
    answers = mixture.chosen[0::2]  # behind each, the one to another prompt
    examples = mixture.examples
    return (
        f"{examples.name}: {plural(len(answers), 'answer')} to train on of "
        f"{len(examples) - len(answers):,}, of which {int((examples.said[answers] > 0).sum()):,} "
        "are wanted, each beside one to another prompt, "
        f"{plural(len(mixture.rows), 'sequence')} of {mixture.sequence_length} per epoch, "
        f"{mixture.full:.1%} full"
    )
