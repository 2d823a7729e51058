"""dolmen generate SOURCE --prompt TEXT"""

import sys
from collections.abc import Sequence

from dolmen.cli.options import GenerateOptions
from dolmen.conversion.source import open_alike, tokenizer_folder
from dolmen.core.config import to_dict
from dolmen.core.errors import BadInput
from dolmen.core.mesh import Mesh
from dolmen.data.tokenizer import PreTrainedTokenizer, load_tokenizer
from dolmen.model.layout import Layout
from dolmen.optim.precision import DTYPES
from dolmen.serving import engine, placed, prompt
from dolmen.serving.cache import Memory


def run(options: GenerateOptions) -> int:
    try:  # before any process, and before a model is read
        options.of_tokens.check()
        for text in options.prompt:
            prompt.check_text(text)
    except ValueError as error:
        raise BadInput(str(error)) from None
    layout = placed.check(
        "generate", [options.folder], Layout(tp=options.layout.tp), options.device
    )
    return placed.start(
        "generate", to_dict(options), layout, options.device, lambda mesh: _generate(options, mesh)
    )


def _generate(options: GenerateOptions, mesh: Mesh) -> int:
    source = open_alike(options.folder, mesh)
    tokenizer = load_tokenizer(tokenizer_folder(source), option="")
    begin = [prompt.encode(tokenizer, text, source.model) for text in options.prompt]
    dtype = DTYPES[options.dtype] if options.dtype else None
    model = engine.load_decoder(source, mesh, dtype)
    texts = _Texts(tokenizer, options.prompt)
    held: list[Memory] = []
    try:
        prompt.answer(
            model,
            tokenizer,
            source,
            begin,
            options,
            texts.add if mesh.first else None,
            held.append,
        )
    finally:
        texts.end()
    if mesh.first:
        print(*held, file=sys.stderr)  # not among the text
    return 0


class _Texts:
    """The prompts and what follows them, on stdout: the first as it comes, the others at the
    end.
    """

    def __init__(self, tokenizer: PreTrainedTokenizer, prompts: Sequence[str]):
        self.tokenizer, self.prompts = tokenizer, prompts
        self.new: list[list[int]] = [[] for _ in prompts]
        self.shown = 0  # characters after the first prompt

    def add(self, index: int, token: int) -> None:
        """Print the prompt with the first new token (all is in order then), and what each adds,
        whole characters alone.
        """
        self.new[index].append(token)
        if index > 0:
            return
        text = self._text(0)
        if len(self.new[0]) == 1:
            print(self.prompts[0], end="", flush=True)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            print(text[self.shown :], end="", flush=True)
            self.shown = len(text)

    def end(self) -> None:
        """Half a character too, and the other texts."""
        if self.new[0]:
            print(self._text(0)[self.shown :])
        for index in range(1, len(self.prompts)):
            if self.new[index]:
                print(self.prompts[index] + self._text(index))

    def _text(self, index: int) -> str:
        return self.tokenizer.decode(self.new[index], skip_special_tokens=True)
