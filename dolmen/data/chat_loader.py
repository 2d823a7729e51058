"""Builds the loader of chats, preference pairs and completions from the data options: the training
and validation examples, and their description for the header of a run. Two consecutive examples
are a pair: the chosen completion and the rejected one.
"""

from dataclasses import replace

import numpy as np

from dolmen.core.messages import plural, printable
from dolmen.data import tokenizer as tokenizers
from dolmen.data.base_loader import Description, Loader
from dolmen.data.batch import MARGIN, SIDE, Batch
from dolmen.data.config import DataConfig
from dolmen.data.examples import Examples, open_examples
from dolmen.data.inputs import Inputs
from dolmen.data.packing import LabelMode, PackedRows
from dolmen.data.sources import DataSource
from dolmen.data.template import MaskingStrategy, Template, template_of
from dolmen.data.tokenizer import PreTrainedTokenizer
from dolmen.model.spec import ModelSpec, ScalarHeadSpec

SHOWN = 600  # characters of the example that is shown, about the first trained token


class ChatLoader(Loader):
    """Loader of chats, preference pairs or completions, in packed rows."""

    mixture: PackedRows
    validation: PackedRows

    @property
    def unit(self) -> str:
        """Name of one prediction, for reports: "completion" for reward models, which are trained on
        one number per completion, else "token".
        """
        return "completion" if self.validation.label_mode == "end" else "token"

    def validation_share(self, sequence_length: int) -> tuple[float, int]:
        """Return (fraction of all data that is held out, predictions per training batch), to choose
        how often to validate; counted in trained tokens, or in completions for reward models.
        """
        training, held_out = self.mixture.tokens, self.validation.tokens
        # neither prompts nor padding, and rows hold several completions
        batch = self.global_batch_size * training / len(self.mixture.rows)
        return held_out / (training + held_out), round(batch)

    def batch(self, step: int, rank: int = 0, ranks: int = 1) -> Batch:
        """Return the packed rows of global batch `step` that data-parallel rank `rank` of `ranks`
        holds.
        """
        rows = self.rows(ranks)
        return self.mixture.batch(self.mixture.read(self.first(step) + rank * rows, rows))


def prepare(
    config: DataConfig,
    inputs: Inputs,
    sequence_length: int,
    global_batch_size: int,
    seed: int,
    progress: bool,
    verify: bool,
    model: ModelSpec | None,
) -> ChatLoader:
    """Build the loader of chats, pairs or completions from checked inputs. `verify`: compare the
    cache with its digests. Sets the tokenizer's chat template to the one used. Raises ValueError
    for rows that cannot be trained on, and for a model that cannot be trained on them.
    """
    refuse_model(config, model)
    template = template_of(inputs.tokenizer, config.template)
    if config.template is not None:
        inputs.tokenizer.chat_template = template.text  # that of the model that is saved
    (source,) = inputs.sources
    # a model with one score per text reads its last token too
    label_mode: LabelMode = (
        "end" if model is not None and isinstance(model.head, ScalarHeadSpec) else "next"
    )
    longest = sequence_length if label_mode == "end" else sequence_length + 1
    examples = open_chats(source, config, template, longest, label_mode, progress, verify)
    # chats of --data.validation
    validation_set = None
    if inputs.validation is not None:
        validation_set = open_chats(
            inputs.validation, config, template, longest, label_mode, progress, verify
        )
    training, held_out = divide(
        examples, validation_set, config.validation_fraction, config.rows == "pairs", label_mode
    )
    validation_examples = examples if validation_set is None else validation_set
    mixture = _rows(examples, training, config, sequence_length, label_mode, seed)
    validation = _rows(validation_examples, held_out, config, sequence_length, label_mode, None)
    description = _describe(mixture, validation, config)
    details = []
    if label_mode == "end":
        # not EOS: transformers finds the end of a text, where it reads the reward, by its padding
        inputs.tokenizer.pad_token_id = tokenizers.padding(inputs.tokenizer)
        details.append(_describe_padding(inputs.tokenizer))
    # one example is shown in the header, to check the template by eye
    what, first = "scored" if label_mode == "end" else "trained", int(mixture.chosen[0])
    example = mark_trained(examples, first, inputs.tokenizer)
    details.append(f"{what} is marked by »« (chat {first}): {example}")
    identity = {
        **identify(config, examples, validation_set),
        "sequence_length": str(sequence_length),
        "global_batch_size": str(global_batch_size),
        "seed": str(seed),
    }
    description = replace(description, details=tuple(details))
    return ChatLoader(
        mixture, validation, global_batch_size, inputs.tokenizer, description, identity
    )


def _rows(
    examples: Examples,
    chosen: np.ndarray,
    config: DataConfig,
    sequence_length: int,
    label_mode: LabelMode,
    seed: int | None,
) -> PackedRows:
    """Pack the `chosen` examples, pairs or completions (config.rows) into rows. `seed`: order of
    training rows; None: validation, where examples are not weighted.
    """
    number = 0 if seed is None else seed
    match config.rows:
        case "pairs":
            return pairs_of(examples, chosen, sequence_length, config.packing, label_mode, number)
        case "completions":
            return completions_of(examples, chosen, sequence_length, config.packing, number)
    return PackedRows(
        examples,
        chosen,
        sequence_length,
        packing=config.packing,
        weighted=seed is not None and examples.weighted,
        seed=number,
    )


def _describe(mixture: PackedRows, validation: PackedRows, config: DataConfig) -> Description:
    """Return the lines of a run's header about its training and validation rows."""
    match config.rows:
        case "pairs":
            training, *changes = describe_pairs(mixture)
            held_out = plural(len(validation.chosen) // 2, "pair")
        case "completions":
            training, changes = describe_completions(mixture), []
            held_out = plural(len(validation.chosen) // 2, "completion")
        case _:
            training, *changes = describe_chats(mixture, config)
            held_out = f"{plural(len(validation.chosen), 'chat')}, {validation.tokens:,} tokens"
    none = "none (--data.validation-fraction is 0)"
    return Description(training, held_out if len(validation.chosen) else none, tuple(changes))


def _describe_padding(tokenizer: PreTrainedTokenizer) -> str:
    """Return the sentence of a run's header that names the pad token."""
    token = tokenizer.pad_token_id
    if token is None:
        return (
            "padding: none, as the tokenizer has no special token but EOS: transformers can score "
            "the exported model only with batch size 1"
        )
    return f"padding: {printable(tokenizer.decode([token]))} ({token}), which is not an EOS token"


def refuse_model(config: DataConfig, model: ModelSpec | None) -> None:
    """Raise ValueError for a model that is not causal, or has blank-filling prefixes."""
    if model is not None and (model.both_ways or model.blanks is not None):
        why = "is a masked language model" if model.both_ways else "has blanks and prefixes (GLM)"
        raise ValueError(
            f"data.rows {config.rows} is for causal language models, but this one {why}: use "
            "--data.rows text"
        )


def open_chats(
    source: DataSource,
    config: DataConfig,
    template: Template,
    longest: int,
    label_mode: LabelMode,
    progress: bool,
    verify: bool,
) -> Examples:
    """Open the tokenised chats of a source, each truncated to `longest` tokens. Trained are, for
    chats, the tokens of config.masking_strategy, for pairs and completions the last turn; a scalar
    head (`label_mode` "end") reads all.
    """
    assert config.rows != "text" and config.rows != "prompts"
    train_on: MaskingStrategy = config.masking_strategy if config.rows == "chats" else "last"
    return open_examples(
        source,
        template,
        "all" if label_mode == "end" else train_on,
        longest,
        config.cache_folder,
        progress,
        verify,
        config.rows,
        config.max_row_bytes,
    )


def identify(
    config: DataConfig, examples: Examples, validation_set: Examples | None
) -> dict[str, str]:
    """Return the entries of the run's fingerprint for its data (name -> text): training and
    validation chats, by content, and how they are packed.
    """
    return {
        "data 1": f"{len(examples):,} chats, hash {examples.content}",
        "validation": (
            (
                f"{config.validation_fraction:g} of the chats held out, chosen by a hash of their "
                "tokens"
            )
            if validation_set is None
            else f"{len(validation_set):,} chats, hash {validation_set.content}"
        ),
        "rows": f"{config.rows}, trained on {config.masking_strategy}, packing {config.packing}",
    }


def divide(
    examples: Examples,
    validation_set: Examples | None,
    fraction: float,
    pairs: bool,
    label_mode: LabelMode,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of the examples (or of the pairs) to train on, and of those to validate
    on.

    Validation has all of `validation_set` if given, whose copies are not trained on, else
    `fraction` of the examples, chosen by a hash of their tokens, so that copies stay together; at
    least one, unless `fraction` is 0. Raises ValueError where nothing is left to train on.
    """
    useful = np.flatnonzero(_useful(examples, pairs, label_mode))
    hashes = _hashes(examples, pairs)[useful]
    if validation_set is not None:
        held_out = np.flatnonzero(_useful(validation_set, pairs, label_mode))
        # copies of validation examples are not trained on
        training = useful[~np.isin(hashes, _hashes(validation_set, pairs))]
    elif not fraction:
        training, held_out = useful, useful[:0]
    else:
        # a uniform 64-bit hash is below fraction x 2^64 with probability `fraction`
        selected = hashes < np.uint64(int(fraction * 2**64))
        if not selected.any():
            # at least one example, always the same
            selected = hashes == hashes.min(initial=2**64 - 1)
        training, held_out = useful[~selected], useful[selected]
    if not len(training):
        kind, all_of = ("pair", len(examples) // 2) if pairs else ("chat", len(examples))
        equal = " or are two equal completions" if pairs else ""
        raise ValueError(
            f"--data.path {examples.name}: of {plural(all_of, kind)} none is left to train on "
            f"({all_of - len(useful):,} have no trained token within sequence_length + 1 "
            f"({examples.longest}){equal}, {len(useful):,} are held out): give more, or set "
            "--train.sequence-length or --data.validation-fraction"
        )
    return training, held_out


def _useful(examples: Examples, pairs: bool, label_mode: LabelMode) -> np.ndarray:
    """Return a mask of the examples, or of the pairs, that have something to train on."""
    return useful(examples, label_mode) if pairs else examples.predictions() > 0


def _hashes(examples: Examples, pairs: bool) -> np.ndarray:
    """Return the token hashes of examples, or, with `pairs`, those of the chosen completion of each
    pair.
    """
    # even: chosen, odd: rejected
    return examples.hashes[0::2] if pairs else examples.hashes


def describe_chats(mixture: PackedRows, config: DataConfig) -> list[str]:
    """Return lines for the run's header: the training chats, then what is left out or truncated."""
    examples = mixture.examples
    places = int(examples.places()[mixture.chosen].sum())
    lines = [
        f"{examples.name}: {plural(len(mixture.chosen), 'chat')} to train on of "
        f"{len(examples):,}, {mixture.tokens:,} trained tokens ({config.masking_strategy}) of "
        f"{places:,}, "
        f"{plural(len(mixture.rows), 'sequence')} of {mixture.sequence_length} per epoch, "
        f"{mixture.full:.1%} full"
    ]
    if long := int(examples.long.sum()):
        lines.append(
            f"{plural(long, 'chat')} of over {examples.longest:,} tokens truncated at the end "
            "(--train.sequence-length)"
        )
    if useless := int((examples.predictions() == 0).sum()):
        lines.append(f"skipped: {plural(useless, 'chat')} without a trained token")
    return lines


def mark_trained(examples: Examples, index: int, tokenizer: PreTrainedTokenizer) -> str:
    """Return the text of example `index` on one line, around its first trained token, with trained
    parts in »«; at most SHOWN (600) characters.
    """
    span = examples.span(index)
    ids, trained = examples.tokens[span].tolist(), examples.trained[span] > 0
    edges = np.flatnonzero(np.diff(trained, prepend=not trained[0])).tolist()
    text = ""
    for first, end in zip(edges, [*edges[1:], len(ids)], strict=True):
        piece = printable(tokenizer.decode(ids[first:end]))
        text += f"»{piece}«" if trained[first] else piece
    at = max(0, text.find("»") - SHOWN // 2)
    before, behind = "... " if at else "", " ..." if at + SHOWN < len(text) else ""
    return before + text[at : at + SHOWN] + behind


def pairs_of(
    examples: Examples,
    pairs: np.ndarray,
    sequence_length: int,
    packing: bool,
    label_mode: LabelMode,
    seed: int,
) -> PackedRows:
    """Pack preference pairs (indices `pairs`) into rows: the two completions of each into two
    consecutive rows, at the same place in the order of each. Batches have numbers[SIDE], 1 at
    tokens of the chosen and -1 at those of the rejected completion, and margins if there are any.
    """
    # examples 2 i and 2 i + 1 are chosen and rejected
    both = np.stack((2 * pairs, 2 * pairs + 1), 1).reshape(-1)
    numbers = {SIDE: np.tile(np.array([1, -1], np.float32), len(examples) // 2)}
    if examples.preference.any():
        numbers[MARGIN] = examples.preference
    return PackedRows(
        examples,
        both,
        sequence_length,
        packing=packing,
        together=2,
        label_mode=label_mode,
        seed=seed,
        per_example=numbers,
    )


def completions_of(
    examples: Examples, chosen: np.ndarray, sequence_length: int, packing: bool, seed: int
) -> PackedRows:
    """Pack completions (indices `chosen`) into rows, each and its unrelated pair, its prompt
    with the next one's completion, in two consecutive rows, for KTO's KL estimate. Raises
    ValueError for a single completion.
    """
    if len(chosen) == 1:
        raise ValueError(
            f"{examples.name}: only one completion is left, but KTO compares completions of "
            "different prompts: give more"
        )
    full = append_unrelated(examples, chosen)
    both = np.stack((chosen, len(examples) + np.arange(len(chosen))), 1).reshape(-1)
    numbers = {SIDE: full.preference}
    return PackedRows(
        full, both, sequence_length, packing=packing, together=2, seed=seed, per_example=numbers
    )


def append_unrelated(examples: Examples, chosen: np.ndarray) -> Examples:
    """Append, for each chosen completion, its prompt with the completion of the next chosen one:
    the unrelated pairs of KTO's KL estimate. Returns the extended examples.
    """

    def parts(index: int) -> tuple[np.ndarray, np.ndarray, int]:
        """Return tokens and trained mask of example `index`, and the place of its first trained
        token.
        """
        span = examples.span(index)
        trained = examples.trained[span]
        return examples.tokens[span], trained, int(np.argmax(trained > 0))

    tokens, marks = [examples.tokens], [examples.trained]
    # the next chosen one, the last with the first: each completion is used once
    for index, other in zip(chosen, np.roll(chosen, -1), strict=True):
        (tokens_, trained, first), (theirs, weights_, begin) = parts(int(index)), parts(int(other))
        tokens.append(np.concatenate((tokens_[:first], theirs[begin:])))
        marks.append(np.concatenate((trained[:first], weights_[begin:])))
    # appended behind the real examples, whose indices stay
    ends = examples.offsets[-1] + np.cumsum([len(token) for token in tokens[1:]], dtype=np.int64)
    count = len(chosen)
    return replace(
        examples,
        tokens=np.concatenate(tokens),
        trained=np.concatenate(marks),
        offsets=np.concatenate((examples.offsets, ends)),
        weights=np.concatenate((examples.weights, np.ones(count, np.float32))),
        hashes=np.concatenate((examples.hashes, np.zeros(count, np.uint64))),
        preference=np.concatenate((examples.preference, np.zeros(count, np.float32))),
    )


def useful(examples: Examples, label_mode: LabelMode) -> np.ndarray:
    """Return a mask [pairs]: True if the two completions differ and each has a trained token. With
    `label_mode` "end" (a scalar head reads the last token) also neither may be truncated.
    """
    predicted = examples.predictions() > 0
    if label_mode == "end":
        # a truncated completion has no end to read the reward at
        predicted = predicted & ~examples.long
    return predicted.reshape(-1, 2).all(1) & ~equal_completions(examples)


def equal_completions(examples: Examples) -> np.ndarray:
    """Return a mask [pairs]: True if both completions of a pair have the same tokens."""
    return examples.hashes[0::2] == examples.hashes[1::2]


def describe_pairs(mixture: PackedRows) -> list[str]:
    """Return lines for the run's header: the training pairs, then what is left out or truncated."""
    examples, count = mixture.examples, len(mixture.examples) // 2
    of = (
        "tokens of completions"
        if mixture.label_mode == "next"
        else "completions, by their last token"
    )
    lines = [
        f"{examples.name}: {plural(len(mixture.chosen) // 2, 'pair')} of completions to train on "
        f"of {count:,}, {mixture.tokens:,} {of}, {plural(len(mixture.rows), 'sequence')} of "
        f"{mixture.sequence_length} per epoch, {mixture.full:.1%} full"
    ]
    if same := int(equal_completions(examples).sum()):
        lines.append(f"skipped: {plural(same, 'pair')} with equal completions")
    long = int((examples.long.reshape(-1, 2).any(1) & ~equal_completions(examples)).sum())
    if long and mixture.label_mode == "end":
        lines.append(
            f"skipped: {plural(long, 'pair')} with a completion of over {examples.longest:,} "
            "tokens with its prompt (--train.sequence-length)"
        )
    elif long:
        lines.append(
            f"completions of {plural(long, 'pair')} of over {examples.longest:,} tokens truncated "
            "at the end (--train.sequence-length)"
        )
    return lines


def describe_completions(mixture: PackedRows) -> str:
    """Return a line for the run's header: the training completions and how many are desirable."""
    completions = mixture.chosen[0::2]  # behind each, the one to another prompt
    examples = mixture.examples
    desirable = int((examples.preference[completions] > 0).sum())
    return (
        f"{examples.name}: {plural(len(completions), 'completion')} to train on of "
        f"{len(examples) - len(completions):,}, of which {desirable:,} are desirable, each "
        "paired with one to another prompt, "
        f"{plural(len(mixture.rows), 'sequence')} of {mixture.sequence_length} per epoch, "
        f"{mixture.full:.1%} full"
    )
