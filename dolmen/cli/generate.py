"""dolmen generate SOURCE --prompt TEXT, or --input FILE --output FILE"""

import sys
from collections.abc import Sequence

from dolmen.conversion.source import open_alike, tokenizer_folder
from dolmen.core.config import to_dict
from dolmen.core.filesystem import expand
from dolmen.core.log import say
from dolmen.core.mesh import Mesh
from dolmen.core.messages import BadInput, escape, message, plural
from dolmen.data.tokenizer import load_tokenizer
from dolmen.launch import process
from dolmen.model.layout import Layout
from dolmen.optim.optimizer import DTYPES
from dolmen.rl import best_of_n
from dolmen.serving import adapters, engine, offline, output_file, processes
from dolmen.serving.config import GenerateConfig
from dolmen.serving.detokenizer import Detokenizer
from dolmen.serving.engine import Engine
from dolmen.serving.generation import check_text, encode
from dolmen.serving.generation_config import apply_generation_config
from dolmen.serving.request import Limits, Request


def run(options: GenerateConfig) -> int:
    try:  # before any process, and before a model is read
        options.of_tokens.check()
        adapters.check_name(options.adapter, adapters.parse_adapters(options.adapters))
        if options.input is not None:
            offline.check_options(options)
            if not process.launched_here():
                if not options.resume:
                    output_file.check_output(expand(options.output or ""), None, False, {}, "")
                best_of_n.check(options)
        for text in options.prompt:
            check_text(text)
    except ValueError as error:
        raise BadInput(str(error)) from None
    split = options.layout
    layout = processes.check_model(
        "generate",
        [options.folder],
        Layout(tp=split.tp, pp=split.pp, dp=split.dp),
        options.device,
        replicas=True,
        weights=options.weights,
        adapters=options.adapters,
    )
    return _answer(options, layout) if options.input is not None else _print(options, layout)


def _answer(options: GenerateConfig, layout: Layout) -> int:
    """A file of prompts."""
    started = process.read_launch()
    # the launcher reads all rows, and refuses what is bad, before it starts others
    first = not process.launched_here() and (started is None or started.rank == 0)
    try:
        job = offline.prepare(options, tell=first, fresh=not process.launched_here())
    except (ValueError, KeyError, OSError) as error:
        raise BadInput(message(error)) from None
    if not job.left:
        rows = f"all {len(job.summary.places):,} rows"
        say(f"{escape(options.output)} has {rows}: nothing is left to do", first)
        return _choose(job) if first else 0

    def work(mesh: Mesh) -> int:
        offline.generate(job, mesh)
        return 0

    code = processes.run("generate", to_dict(options), layout, options.device, work)
    return code or (_choose(job) if first else 0)


def _choose(job: offline.Job) -> int:
    """The best answers, once all are there."""
    if job.config.best is None:
        return 0
    try:
        found = best_of_n.choose(job)
    except ValueError as error:
        raise BadInput(str(error)) from None
    print(
        f"{escape(job.config.best)} has the best answer of {plural(found.rows, 'row')}: "
        f"a reward of {found.reward:.4g}, of all samples {found.of_all:.4g}"
    )
    if found.failed:
        say(
            f"WARNING: {plural(found.failed, 'sample')} without a reward, and "
            f"{plural(found.without, 'row')} without any, left out"
        )
    return 0


def _print(options: GenerateConfig, layout: Layout) -> int:
    """Prompts, and what follows them."""
    return processes.run(
        "generate", to_dict(options), layout, options.device, lambda mesh: _generate(options, mesh)
    )


def _generate(options: GenerateConfig, mesh: Mesh) -> int:
    source = open_alike(options.folder, mesh)
    asked, told = apply_generation_config(options, source.generation_config)
    for line in told:
        say(line, mesh.first)
    tokenizer = load_tokenizer(tokenizer_folder(source), option="")
    begin = [encode(tokenizer, text, source.model) for text in options.prompt]
    dtype = DTYPES[options.dtype] if options.dtype else None
    model = engine.load_placed(source, mesh, dtype, options.weights)
    beside = adapters.open_adapters(adapters.parse_adapters(options.adapters), source, mesh)
    texts = _Texts(
        [Detokenizer(tokenizer, options.stop) for _ in begin], options.prompt, mesh.first
    )
    limits = Limits(tokens=options.max_batch_tokens)
    ends, known = engine.stop_tokens(source), tokenizer.get_vocab().values()
    with Engine(
        model,
        stop=ends,
        known=known,
        limits=limits,
        mesh=mesh,
        weights=options.weights,
        adapters=adapters.place_adapters(beside, model, mesh),
    ) as running:
        for i, tokens in enumerate(begin):
            request = Request(tokens, asked.of_tokens, i, options.seed, adapter=options.adapter)
            running.add(request)
        try:
            while running.busy:
                output = running.step()
                for chosen in output.new_tokens:
                    if texts.add(chosen.number, chosen.token):
                        running.cancel(chosen.number)
                engine.require_finite(output.finished)
        finally:
            texts.end()
        if mesh.first:
            print(running.usage, file=sys.stderr)  # not among the text
    return 0


class _Texts:
    """The prompts and what follows them, on stdout: the first as it comes, the others at the
    end.
    """

    def __init__(self, texts: Sequence[Detokenizer], prompts: Sequence[str], shown: bool):
        self.texts, self.prompts, self.shown = texts, prompts, shown

    def add(self, index: int, token: int) -> bool:
        """Print the prompt with the first new token (all is in order then), and what each adds,
        whole characters alone. -> Whether it has come to a stop string.
        """
        text = self.texts[index]
        new = text.add(token)
        if index == 0 and len(text.tokens) == 1:
            self._print(self.prompts[0])
        if index == 0:
            self._print(new)
        return text.stopped is not None

    def end(self) -> None:
        """Half a character too, and the other texts."""
        for index, (begin, text) in enumerate(zip(self.prompts, self.texts, strict=True)):
            if text.tokens:
                rest = text.end()
                self._print((rest if index == 0 else begin + text.whole) + "\n")

    def _print(self, text: str) -> None:
        if self.shown:
            print(text, end="", flush=True)
