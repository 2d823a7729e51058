"""dolmen generate SOURCE --prompt TEXT"""

import sys

from dolmen.cli.options import GenerateOptions
from dolmen.cli.verify import compute
from dolmen.conversion.source import open_alike, tokenizer_folder
from dolmen.core.errors import BadInput
from dolmen.core.mesh import Mesh
from dolmen.data.tokenizer import load_tokenizer
from dolmen.optim.precision import DTYPES
from dolmen.serving import engine, prompt, sample
from dolmen.serving.cache import Memory


def run(options: GenerateOptions, argv: list[str]) -> int:
    try:  # before any process, and before a model is read
        sample.check_knobs(options.temperature, options.top_k, options.top_p)
        prompt.check_text(options.prompt)
    except ValueError as error:
        raise BadInput(str(error)) from None
    return compute(
        argv, "generate", options.folder, options, lambda mesh: _generate(options, mesh), []
    )


def _generate(options: GenerateOptions, mesh: Mesh) -> int:
    source = open_alike(options.folder, mesh)
    tokenizer = load_tokenizer(tokenizer_folder(source), option="")
    begin = prompt.encode(tokenizer, options.prompt)
    dtype = DTYPES[options.dtype] if options.dtype else None
    model = engine.load_decoder(source, mesh, dtype)
    new, shown = [], 0
    held: list[Memory] = []

    def show(_, token: int) -> None:
        """Print the prompt with the first new token (all is in order then), and what each adds,
        whole characters alone.
        """
        nonlocal shown
        if mesh.first and not new:
            print(options.prompt, end="", flush=True)
        new.append(token)
        text = tokenizer.decode(new, skip_special_tokens=True)
        if mesh.first and not text.endswith("\N{REPLACEMENT CHARACTER}"):
            print(text[shown:], end="", flush=True)
            shown = len(text)

    try:
        engine.generate(
            model,
            [begin],
            options.max_new_tokens,
            options.temperature,
            options.top_k,
            options.top_p,
            engine.stop_tokens(source),
            options.seed,
            show,
            tokenizer.get_vocab().values(),
            on_memory=held.append,
        )
    finally:
        if mesh.first and new:
            print(tokenizer.decode(new, skip_special_tokens=True)[shown:])  # half a character too
    if mesh.first:
        print(*held, file=sys.stderr)  # not among the text
    return 0
