"""dolmen generate DIR --prompt TEXT"""

from dataclasses import dataclass

import tyro

from dolmen.cli.errors import BadInput
from dolmen.cli.verify import Split, compute
from dolmen.core.mesh import Mesh
from dolmen.data import tokenizer as tokenizers


@dataclass(frozen=True)
class GenerateOptions:
    """Continue a prompt with a transformers directory. Prints the prompt and the continuation;
    greedy unless --temperature.
    """

    folder: tyro.conf.Positional[str]
    """Directory or hub id."""
    prompt: str
    """Text to continue."""
    max_new_tokens: int = 64
    """Most tokens to add; an end-of-text token ends earlier."""
    temperature: float = 0.0
    """0 takes the likeliest token; 1 draws from the model's own distribution."""
    top_k: int | None = None
    """Draw from this many likeliest tokens."""
    top_p: float | None = None
    """Draw from the likeliest tokens that hold this much probability."""
    seed: int = 0
    """Of the draws."""
    layout: Split = Split()


def run(argv: list[str]) -> int:
    options = tyro.cli(GenerateOptions, args=argv, prog="dolmen generate")
    return compute(
        argv, "generate", options.folder, options.layout, lambda mesh: _generate(options, mesh), []
    )


def _generate(options: GenerateOptions, mesh: Mesh) -> int:
    from dolmen.serve import engine

    tokenizer = tokenizers.load_tokenizer(options.folder)
    model = engine.load(options.folder, mesh)
    begin = [
        token for token in (tokenizer.bos_token_id, tokenizer.eos_token_id) if token is not None
    ]
    prompt = tokenizer(options.prompt)["input_ids"] or begin[:1]
    if not prompt:
        raise BadInput(
            "--prompt is empty and the tokenizer names no token to begin with: give a prompt"
        )
    new, shown = [], 0

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
            [prompt],
            options.max_new_tokens,
            options.temperature,
            options.top_k,
            options.top_p,
            engine.stop_tokens(options.folder),
            options.seed,
            show,
        )
    finally:
        if mesh.first and new:
            print(tokenizer.decode(new, skip_special_tokens=True)[shown:])  # half a character too
    return 0
