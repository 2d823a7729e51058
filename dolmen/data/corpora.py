"""The corpus of a source, whatever its documents are: text that is tokenised, or tokens."""

from dolmen.data import tokenizer as tokenizers
from dolmen.data.config import TokenConfig
from dolmen.data.corpus import Corpus, join, open_text
from dolmen.data.indexed import open_indexed
from dolmen.data.inputs import Inputs
from dolmen.data.sources import Source


def open_corpus(
    source: Source,
    config: TokenConfig,
    inputs: Inputs,
    progress: bool = True,
    option: str = "--data.path",
    verify: bool = True,
) -> Corpus:
    """The tokens of `source`: those of its text from the cache or built into it, and then those of
    its .bin. With `verify` each cached byte is compared with its digest, else only sizes.
    ValueError if it holds no text, and for tokens that are none.
    """
    parts, tokenizer, cache = [], inputs.tokenizer, config.cache_folder
    if source.text:
        parts.append(
            open_text(
                source,
                tokenizer,
                inputs.end_of_text,
                config.text_field,
                cache,
                config.workers,
                progress,
                option,
                verify,
            )
        )
    size = tokenizers.vocabulary_size(tokenizer)
    for file in source.indexed:
        parts.append(open_indexed(file, size, inputs.end_of_text, cache, progress, option, verify))
    return join(source.name, parts)
