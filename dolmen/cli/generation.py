"""The verbs generate, chat and serve.

dolmen generate SOURCE --prompt TEXT
dolmen generate SOURCE --input FILE --output FILE
dolmen chat MODEL
dolmen serve MODEL
"""

import readline
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec

from dolmen.conversion.source import ModelSource
from dolmen.core.config import to_dict
from dolmen.core.filesystem import expand
from dolmen.core.log import say
from dolmen.core.mesh import Mesh
from dolmen.core.messages import BadInput, as_bad_input, escape, plural
from dolmen.launch import process
from dolmen.model.layout import Layout
from dolmen.rl import best_of_n
from dolmen.serving import adapters, offline, output_file, processes
from dolmen.serving.chat import ChatSession
from dolmen.serving.config import ChatConfig, GenerateConfig, ServeConfig
from dolmen.serving.engine import open_engine, require_finite
from dolmen.serving.generation import (
    Detokenizer,
    apply_generation_config,
    check_text,
    encode,
)
from dolmen.serving.processes import Resolved
from dolmen.serving.request import Limits, Request
from dolmen.serving.speculation import check_draft


def run_generate(options: GenerateConfig) -> int:
    """Run `dolmen generate`: check the options, open the model, and on the processes of the layout
    generate completions of --prompt, which are printed, or of the rows of --input, which go to a
    file. Returns the exit code. Raises BadInput.
    """
    with as_bad_input():  # before any process, and before a model is read
        options.sampling_params.check()
        adapters.check_name(options.adapter, adapters.parse_adapters(options.adapters))
        if options.input is not None:
            offline.check_options(options)
            if not process.launched_here():
                if not options.resume:
                    output_file.check_output(expand(options.output or ""), None, False, {}, "")
                best_of_n.check_options(options)
        for text in options.prompt:
            check_text(text)
    split = options.layout
    resolved = processes.resolve(
        "generate",
        [options.folder, *options.speculative.models],
        Layout(tp=split.tp, pp=split.pp, dp=split.dp),
        options.device,
        replicas=True,
        weights=options.weights,
        adapters=options.adapters,
    )
    _check_draft(resolved)
    generate = _generate_prompts if options.input is None else _generate_file
    return generate(options, resolved)


def _check_draft(resolved: Resolved) -> None:
    """Raise BadInput if there is a draft model for speculative decoding, the second of the opened
    models, and it does not suit the first, such as by its vocabulary.
    """
    with as_bad_input():
        for draft in resolved.sources[1:]:
            check_draft(draft.spec, resolved.source.spec)


def _generate_file(options: GenerateConfig, resolved: Resolved) -> int:
    """Generate completions of all unfinished rows of --input on the processes of the layout, and
    write them to --output; then, if --best is set, write the best sample of each row by its reward.
    Returns the exit code. Raises BadInput.
    """
    started, fresh = process.read_launch(), not process.launched_here()
    # the launcher reads all rows, and refuses what is bad, before it starts others
    first = fresh and (started is None or started.rank == 0)
    with as_bad_input():
        models = best_of_n.resolve_rewards(options, resolved.source) if fresh else {}
        job = offline.prepare(options, resolved.source, resolved.tokenizer(), first, fresh)
    if job.unfinished:

        def work(mesh: Mesh, source: ModelSource, draft: ModelSource | None = None) -> int:
            """Generate completions of this process's share of the rows and write them. Returns
            0.
            """
            offline.generate(job, source, mesh, draft)
            return 0

        if code := resolved.run(to_dict(options), work):
            return code
    else:
        rows = f"all {len(job.summary.places):,} rows"
        say(f"{escape(options.output)} has {rows}: nothing left to do", first)
    # rewards are computed once, after all processes have ended
    if first and options.best is not None:
        _choose_best(job, models)
    return 0


def _choose_best(job: offline.Job, models: Mapping[str, ModelSource]) -> None:
    """Compute the rewards of all samples, write the best sample of each row to --best, and print
    the mean rewards, with a warning if samples have none. `models`: reward models by name. Raises
    BadInput.
    """
    with as_bad_input():
        best = best_of_n.choose(job, models)
    print(
        f"{escape(job.config.best)} has the best completion of {plural(best.rows, 'row')}: mean "
        f"reward {best.reward:.4g}, mean of all samples {best.of_all:.4g}"
    )
    if best.failed:
        say(
            f"WARNING: {plural(best.failed, 'sample')} without a reward; "
            f"{plural(best.without, 'row')} without any reward skipped"
        )


def _generate_prompts(options: GenerateConfig, resolved: Resolved) -> int:
    """Generate completions of all --prompt texts together, on the processes of the layout, and
    print prompts and completions on the first rank. Returns the exit code. Raises BadInput.
    """
    with as_bad_input():
        config, notes = apply_generation_config(options, resolved.source.generation_config)
        config.sampling_params.check()
        tokenizer = resolved.tokenizer()
        prompts = [encode(tokenizer, text, resolved.source.model) for text in options.prompt]
    requests = [
        Request(tokens, config.sampling_params, i, options.seed, adapter=options.adapter)
        for i, tokens in enumerate(prompts)
    ]
    limits = Limits(tokens=options.max_batch_tokens)

    def work(mesh: Mesh, source: ModelSource, draft: ModelSource | None = None) -> int:
        """Load this process's part of the model, generate all completions with the other ranks, and
        print them on the first. Returns 0.
        """
        for line in notes:
            say(line, mesh.first)
        texts = [Detokenizer(tokenizer, options.stop) for _ in prompts]
        printer = CompletionPrinter(texts, options.prompt, mesh.first)
        with open_engine(
            options, source, tokenizer, mesh, limits, options.adapters, draft
        ) as engine:
            for request in requests:
                engine.add(request)
            try:
                while engine.busy:
                    output = engine.step()
                    for chosen in output.new_tokens:
                        if printer.add(chosen.number, chosen.token):
                            # the engine has no stop strings
                            engine.cancel(chosen.number)
                    require_finite(output.finished)
            finally:
                printer.end()
        if options.speculative.method is not None:
            say(f"speculative decoding: {engine.acceptance}", mesh.first)
        return 0

    return resolved.run(to_dict(options), work)


class CompletionPrinter:
    """Prints prompts and their completions on stdout: the first one while it is generated, the
    others when all are finished. Prints nothing unless `visible`.
    """

    def __init__(self, texts: Sequence[Detokenizer], prompts: Sequence[str], visible: bool):
        """Prepare to print the completions of `prompts`. `texts`: a detokenizer for each of them;
        `visible`: False on ranks that print nothing.
        """
        self.texts, self.prompts, self.visible = texts, prompts, visible

    def add(self, index: int, token: int) -> bool:
        """Add a token to the completion `index`, and return whether this completion has reached a
        stop string. Of the first completion (index 0), the new text is printed, and its prompt
        before the first token, so that nothing is printed when the request fails.
        """
        text = self.texts[index]
        new = text.add(token)
        if index == 0 and len(text.tokens) == 1:
            self._print(self.prompts[0])
        # only one completion can be streamed to one stdout
        if index == 0:
            self._print(new)
        return text.stopped is not None

    def end(self) -> None:
        """Print the rest of the first completion, then the other prompts with their completions.
        Those without any token are left out.
        """
        for index, (prompt, text) in enumerate(zip(self.prompts, self.texts, strict=True)):
            if text.tokens:
                rest = text.end()
                self._print((rest if index == 0 else prompt + text.whole) + "\n")

    def _print(self, text: str) -> None:
        """Print text to stdout without a newline, if this rank prints."""
        # the first rank
        if self.visible:
            print(text, end="", flush=True)


CHAT_HELP = """\
/reset     start a new chat
/retry     generate another reply to the last message
/history   print all messages
/help      print this help
/exit      end the chat (or Ctrl-D)
Ctrl-C     interrupt the reply
End a line with \\ to continue the message in the next line."""


def run_chat(options: ChatConfig) -> int:
    """Run `dolmen chat`: load a model and chat in the terminal until the user ends it. Returns the
    exit code. Raises BadInput for wrong options, and for a model without a chat template.
    """
    with as_bad_input():
        options.sampling_params.check()
        resolved = processes.resolve(
            "chat",
            [options.folder, *options.speculative.models],
            Layout(),
            options.device,
            weights=options.weights,
        )
        _check_draft(resolved)
        config, notes = apply_generation_config(options, resolved.source.generation_config)
        config.sampling_params.check()
        chat = ChatSession(resolved.source, resolved.tokenizer(), config)
    for line in notes:
        say(line)

    def work(mesh: Mesh, _: ModelSource, draft: ModelSource | None = None) -> int:
        """Load the model, and chat in the terminal until the user ends it. Returns 0."""
        # one process: the chat has the model that was opened here
        with chat.engine(mesh, draft):
            Terminal(chat).talk()
        return 0

    return resolved.run(to_dict(options), work)


class Terminal:
    """The chat in a terminal: replies on stdout, everything else on stderr; a line that begins with
    / is a command.
    """

    def __init__(self, chat: ChatSession):
        """Prepare a chat on stdin and stdout; at a terminal, arrow keys recall earlier messages."""
        self.chat = chat
        self.interactive = sys.stdin.isatty()
        readline.set_auto_history(self.interactive)
        self.commands: dict[str, Callable[[], None]] = {
            "/reset": self._reset,
            "/retry": self._retry,
            "/history": self._history,
            "/help": lambda: say(CHAT_HELP),
        }

    def talk(self) -> None:
        """Read messages from stdin and print the model's replies until /exit or the end of the
        input. Lines that begin with / are commands (/reset, /retry, /history, /help).
        """
        say(CHAT_HELP, self.interactive)
        for text in self._read_messages():
            if text == "/exit":
                return
            if text in self.commands:
                self.commands[text]()
            elif text.startswith("/"):
                say(f"there is no command {text.split()[0]}: /help lists the commands")
            elif text:
                self._print_reply(text)

    def _read_messages(self) -> Iterator[str]:
        """Yield the user's messages until the end of the input. Ctrl-C while a message is typed
        prints how to end the chat.
        """
        while True:
            try:
                yield self._read()
            except EOFError:
                return
            except KeyboardInterrupt:
                say("\n/exit or Ctrl-D ends the chat")

    def _read(self) -> str:
        """Read a message from stdin and return it, stripped: one line, or more while lines end in a
        backslash. Raises EOFError at the end of the input.
        """
        lines = [input("> " if self.interactive else "")]
        while lines[-1].endswith("\\"):
            # the backslash continues the message
            lines[-1] = lines[-1][:-1]
            lines.append(input("  " if self.interactive else ""))
        return "\n".join(lines).strip()

    def _print_reply(self, text: str) -> None:
        """Print the model's reply to the message `text` as it is generated, and a note if it was
        truncated. Ctrl-C interrupts it; a ValueError is printed, not raised.
        """
        # instead of KeyboardInterrupt in the middle of a step
        with process.handling({signal.SIGINT: lambda *_: self.chat.stop()}):
            try:
                for part in self.chat.reply(text):
                    print(part, end="", flush=True)
                print(flush=True)
                if self.chat.truncated:
                    limit = self.chat.config.sampling_params.max_new_tokens
                    say(f"(the reply was truncated at {limit:,} tokens: increase --max-new-tokens)")
            except ValueError as error:
                # the chat goes on: the user may shorten it or /reset
                say(str(error))

    def _reset(self) -> None:
        """Run the command /reset: forget all messages, and say so."""
        self.chat.reset()
        say("started a new chat")

    def _retry(self) -> None:
        """Run the command /retry: replace the reply to the last message by a new one, and print it;
        print a note if there is no message.
        """
        text = self.chat.undo()
        if text is None:
            say("there is no message to reply to yet")
        else:
            self._print_reply(text)

    def _history(self) -> None:
        """Run the command /history: print all messages with their roles, to stderr."""
        for message_ in self.chat.messages:
            say(f"{message_['role']}: {message_['content']}")


SERVER_PACKAGES = ("fastapi", "uvicorn", "prometheus_client")


def run_serve(options: ServeConfig) -> int:
    """Run `dolmen serve`: load a model on the processes of the layout and serve it over HTTP with
    OpenAI's API until it is stopped. Returns the exit code. Raises BadInput, also if the packages
    of the extra `serve` are not installed.
    """
    # found without importing them
    missing = [name for name in SERVER_PACKAGES if find_spec(name) is None]
    if missing:
        raise BadInput(f"{missing[0]} is not installed: pip install 'dolmen[serve]'")
    from dolmen.serving.http import server  # an extra

    resolved = processes.resolve(
        "serve",
        [options.folder, *options.speculative.models],
        Layout(tp=options.layout.tp),
        options.device,
        adapters=options.adapters,
        weights=options.weights,
    )
    _check_draft(resolved)
    with as_bad_input():
        tokenizer = resolved.tokenizer()
        if not process.launched_here():
            # in the launcher only, before workers are started
            server.check(options, resolved.source, tokenizer)

    def work(mesh: Mesh, source: ModelSource, draft: ModelSource | None = None) -> int:
        """Load this process's part of the model and serve requests with the other ranks until the
        server is stopped. Returns 0.
        """
        server.serve(options, source, tokenizer, mesh, draft)
        return 0

    return resolved.run(to_dict(options), work)
