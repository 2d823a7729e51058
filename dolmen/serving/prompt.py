"""From prompts to the tokens a model begins with, and to those that follow: the same for the
command line, Python and the end of a run.
"""

from collections.abc import Callable, Collection, Sequence

from dolmen.conversion.source import Source
from dolmen.core.messages import shown
from dolmen.data.tokenizer import PreTrainedTokenizer
from dolmen.families import Model, special_tokens
from dolmen.files import tokenizer_files
from dolmen.model.decoder import Decoder
from dolmen.serving import engine
from dolmen.serving.cache import Memory
from dolmen.serving.config import GenerateConfig


def encode(tokenizer: PreTrainedTokenizer, prompt: str, model: Model) -> list[int]:
    """The tokens of `prompt`, as the tokenizer would begin a text and the model's code frames it;
    of an empty one the tokenizer's beginning of text, or else its end. Raises ValueError where
    there is none, and for what is no text.
    """
    check_text(prompt)
    with tokenizer_files.refused_by_name("--prompt"):
        tokens = special_tokens.framed(model, tokenizer(prompt)["input_ids"])
    begin = (tokenizer.bos_token_id, tokenizer.eos_token_id)
    tokens = tokens or [token for token in begin if token is not None][:1]
    if not tokens:
        raise ValueError(
            "--prompt is empty and the tokenizer names no token to begin with: give a prompt"
        )
    return tokens


def check_text(prompt: str) -> None:
    """Raises ValueError for what is no text, and for half a character: bytes of a command line that
    are not UTF-8 reach Python so, and no tokenizer takes them.
    """
    if not isinstance(prompt, str):
        raise ValueError(f"the prompt is {shown(prompt)}: it must be a text")
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"--prompt is not UTF-8 text: character {error.start + 1} is a lone surrogate "
            f"(U+{ord(prompt[error.start]):04X})"
        ) from None


def answer(
    model: Decoder,
    tokenizer: PreTrainedTokenizer | None,
    source: Source,
    prompts: Sequence[Sequence[int]],
    asked: GenerateConfig,
    on_token: Callable[[int, int], None] | None = None,
    on_memory: Callable[[Memory], None] | None = None,
    batch: int = engine.AT_ONCE,
    ends: Collection[int] = (),
) -> list[list[int]]:
    """`engine.generate` as it is asked for, with what a source says of it: where a text ends, at
    `ends` too, and, with a tokenizer, which tokens there are. `prompts` are of `encode`.
    """
    options = asked.of_tokens
    return engine.generate(
        model,
        prompts,
        options.max_new_tokens,
        options.temperature,
        options.top_k,
        options.top_p,
        engine.stop_tokens(source) | {*ends},
        asked.seed,
        on_token,
        None if tokenizer is None else tokenizer.get_vocab().values(),
        batch,
        on_memory,
    )
