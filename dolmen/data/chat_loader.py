"""From options to batches of chats, and of pairs of answers: what is trained on, what is held out,
and what is told of it.
"""

from dataclasses import replace

import numpy as np

from dolmen.core.messages import plural, printable
from dolmen.data import pair_loader
from dolmen.data import tokenizer as tokenizers
from dolmen.data.batch import Batch
from dolmen.data.batches import Description, Loader
from dolmen.data.config import DataConfig
from dolmen.data.examples import Examples, open_examples
from dolmen.data.inputs import Inputs
from dolmen.data.packing import Rows, Say
from dolmen.data.sources import Source
from dolmen.data.template import MaskingStrategy, Template, template_of
from dolmen.data.tokenizer import PreTrainedTokenizer
from dolmen.model.spec import ModelSpec, ScalarHeadSpec

SHOWN = 600  # characters of the example that is shown, about the first trained token


class ChatLoader(Loader):
    """Rows of chats, or of answers."""

    mixture: Rows
    validation: Rows

    @property
    def unit(self) -> str:
        return "answer" if self.validation.say == "end" else "token"

    def validation_share(self, sequence_length: int) -> tuple[float, int]:
        if self.unit == "token":
            return super().validation_share(sequence_length)
        training, held = len(self.mixture.chosen), len(self.validation.chosen)
        batch = self.global_batch_size * training / len(self.mixture.rows)
        return held / (training + held), round(batch)

    def batch(self, step: int, rank: int = 0, ranks: int = 1) -> Batch:
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
    """From chats to batches. Raises ValueError for chats that cannot be trained on, and for a model
    that is not taught by them.
    """
    refuse_model(config, model)
    template = template_of(inputs.tokenizer, config.template)
    if config.template is not None:
        inputs.tokenizer.chat_template = template.text  # that of the model that is saved
    (source,) = inputs.sources
    # a model that says one number of a whole text reads its last token too
    say: Say = "end" if model is not None and isinstance(model.head, ScalarHeadSpec) else "next"
    longest = sequence_length if say == "end" else sequence_length + 1
    examples = opened(source, "--data.path", config, template, longest, say, progress, verify)
    judge = None
    if inputs.validation is not None:
        option = "--data.validation"
        judge = opened(inputs.validation, option, config, template, longest, say, progress, verify)
    training, held = divide(
        examples, judge, config.validation_fraction, config.rows == "pairs", say
    )
    judged = examples if judge is None else judge
    mixture = _rows(examples, training, config, sequence_length, say, seed)
    validation = _rows(judged, held, config, sequence_length, say, None)
    description = _describe(mixture, validation, config)
    details = []
    if say == "end":
        set_padding(inputs.tokenizer)
        details.append(_told_padding(inputs.tokenizer))
    what, first = "judged" if say == "end" else "trained", int(mixture.chosen[0])
    shown = marked(examples, first, inputs.tokenizer)
    details.append(f"{what} is what stands in »«, as of chat {first}: {shown}")
    identity = {
        **identify(config, examples, judge),
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
    say: Say,
    seed: int | None,
) -> Rows:
    """The chosen examples, or pairs, in sequences. `seed`: None of what is validated on, where no
    example weighs more than another.
    """
    number = 0 if seed is None else seed
    match config.rows:
        case "pairs":
            return pair_loader.pairs_of(
                examples, chosen, sequence_length, config.packing, say, number
            )
        case "completions":
            return pair_loader.completions_of(
                examples, chosen, sequence_length, config.packing, number
            )
    return Rows(
        examples,
        chosen,
        sequence_length,
        packing=config.packing,
        weighted=seed is not None and examples.weighted,
        seed=number,
    )


def _describe(mixture: Rows, validation: Rows, config: DataConfig) -> Description:
    """Describe the training and validation rows for the header of a run."""
    match config.rows:
        case "pairs":
            training, *changes = pair_loader.describe_pairs(mixture)
            held = plural(len(validation.chosen) // 2, "pair")
        case "completions":
            training, changes = pair_loader.describe_completions(mixture), []
            held = plural(len(validation.chosen) // 2, "answer")
        case _:
            training, *changes = describe_chats(mixture, config)
            held = f"{plural(len(validation.chosen), 'chat')}, {validation.tokens:,} tokens"
    none = "none (--data.validation-fraction is 0)"
    return Description(training, held if len(validation.chosen) else none, tuple(changes))


def set_padding(tokenizer: PreTrainedTokenizer) -> None:
    """Give the tokenizer, which is saved with a reward model, padding that programs which look for
    it, as transformers does, do not take for the end of a text; none, where it has no such token.
    """
    tokenizer.pad_token_id = tokenizers.padding(tokenizer)


def _told_padding(tokenizer: PreTrainedTokenizer) -> str:
    token = tokenizer.pad_token_id
    if token is None:
        return (
            "padding: none, as the tokenizer has no special token but the one that ends a text: "
            "transformers scores the exported model one text at a time"
        )
    return f"padding: {printable(tokenizer.decode([token]))} ({token}), which ends no text"


def refuse_model(config: DataConfig, model: ModelSpec | None) -> None:
    """Raises ValueError for a model that foretells no next token."""
    if model is not None and (model.both_ways or model.blanks is not None):
        why = "fills in masked tokens" if model.both_ways else "has blanks and prefixes of its own"
        raise ValueError(
            f"data.rows {config.rows} is for models that foretell the next token, and this one "
            f"{why}: use --data.rows text"
        )


def opened(
    source: Source,
    option: str,
    config: DataConfig,
    template: Template,
    longest: int,
    say: Say,
    progress: bool,
    verify: bool,
) -> Examples:
    """The chats of a source, or its pairs, of which the answer alone is trained, or, of one number,
    no token.
    """
    assert config.rows != "text" and config.rows != "prompts"
    train_on: MaskingStrategy = config.masking_strategy if config.rows == "chats" else "last"
    return open_examples(
        source,
        template,
        "all" if say == "end" else train_on,
        longest,
        config.cache_folder,
        progress,
        option,
        verify,
        config.rows,
        config.max_row_bytes,
    )


def identify(config: DataConfig, examples: Examples, judge: Examples | None) -> dict[str, str]:
    """What chats are trained on, and what is validated on, by content."""
    return {
        "data 1": f"{len(examples):,} chats, hash {examples.content}",
        "validation": (
            f"{config.validation_fraction:g} of the chats held out, drawn by their tokens"
            if judge is None
            else f"{len(judge):,} chats, hash {judge.content}"
        ),
        "rows": f"{config.rows}, trained on {config.masking_strategy}, packing {config.packing}",
    }


def divide(
    examples: Examples, judge: Examples | None, fraction: float, pairs: bool, say: Say
) -> tuple[np.ndarray, np.ndarray]:
    """The examples to train on, or the pairs of two, and those to validate on, which are of `judge`
    if there is one. Which are held out is decided by their tokens, of a pair by the chosen ones:
    copies are together. Where chance draws none, it is the one with the smallest hash. Raises
    ValueError where nothing is left to train on.
    """
    useful = np.flatnonzero(_useful(examples, pairs, say))
    hashes = _hashes(examples, pairs)[useful]
    if judge is not None:
        held = np.flatnonzero(_useful(judge, pairs, say))
        training = useful[~np.isin(hashes, _hashes(judge, pairs))]
    elif not fraction:
        training, held = useful, useful[:0]
    else:
        drawn = hashes < np.uint64(int(fraction * 2**64))
        if not drawn.any():
            drawn = hashes == hashes.min(initial=2**64 - 1)
        training, held = useful[~drawn], useful[drawn]
    if not len(training):
        kind, all_of = ("pair", len(examples) // 2) if pairs else ("chat", len(examples))
        equal = " or are two equal answers" if pairs else ""
        raise ValueError(
            f"--data.path {examples.name}: of {plural(all_of, kind)} none is left to train on "
            f"({all_of - len(useful):,} have no trained token within sequence_length + 1 "
            f"({examples.longest}){equal}, {len(useful):,} are held out): give more, or set "
            "--train.sequence-length or --data.validation-fraction"
        )
    return training, held


def _useful(examples: Examples, pairs: bool, say: Say) -> np.ndarray:
    return pair_loader.useful(examples, say) if pairs else examples.predictions() > 0


def _hashes(examples: Examples, pairs: bool) -> np.ndarray:
    return examples.hashes[0::2] if pairs else examples.hashes


def describe_chats(mixture: Rows, config: DataConfig) -> list[str]:
    """Describe the chats that are trained on, then what is left out or cut off."""
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
            f"the ends of {plural(long, 'chat')} of over {examples.longest:,} tokens are "
            "cut off (--train.sequence-length)"
        )
    if useless := int((examples.predictions() == 0).sum()):
        lines.append(f"left out: {plural(useless, 'chat')} in which no token would be trained")
    return lines


def marked(examples: Examples, index: int, tokenizer: PreTrainedTokenizer) -> str:
    """The text of an example on one line, with what is trained of it in »«."""
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
