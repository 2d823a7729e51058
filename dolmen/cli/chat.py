"""dolmen chat MODEL"""

import readline
import signal
import sys
from collections.abc import Callable, Iterator

from dolmen.conversion.source import open_source, tokenizer_folder
from dolmen.core.config import to_dict
from dolmen.core.log import say
from dolmen.core.mesh import Mesh
from dolmen.core.messages import BadInput, message
from dolmen.data.tokenizer import load_tokenizer
from dolmen.launch import process
from dolmen.model.layout import Layout
from dolmen.serving import processes
from dolmen.serving.chat import Chat
from dolmen.serving.config import ChatConfig
from dolmen.serving.detokenizer import check_stop
from dolmen.serving.generation_config import apply_generation_config

TOLD = """\
/reset     begin anew, and forget all that was said
/retry     answer the last message again
/history   all that was said
/help      these lines
/exit      end the chat, as Ctrl-D does
Ctrl-C     end the answer
A line that ends with \\ goes on in the next one."""


def run(options: ChatConfig) -> int:
    layout = processes.check_model(
        "chat", [options.folder], Layout(), options.device, weights=options.weights
    )
    try:
        options.of_tokens.check()
        check_stop(options.stop)
        source = open_source(options.folder)
        asked, told = apply_generation_config(options, source.generation_config)
        asked.of_tokens.check()
        chat = Chat(source, load_tokenizer(tokenizer_folder(source), option=""), asked)
    except (ValueError, KeyError, OSError) as error:
        raise BadInput(message(error)) from None
    for line in told:
        say(line)

    def work(mesh: Mesh) -> int:
        with chat.engine(mesh):
            Terminal(chat).talk()
        return 0

    return processes.run("chat", to_dict(options), layout, options.device, work)


class Terminal:
    """The chat as a person sees it: answers on stdout, all else on stderr."""

    def __init__(self, chat: Chat):
        self.chat = chat
        self.person = sys.stdin.isatty()
        readline.set_auto_history(self.person)  # arrows, and what was said before
        self.commands: dict[str, Callable[[], None]] = {
            "/reset": self._reset,
            "/retry": self._retry,
            "/history": self._history,
            "/help": lambda: say(TOLD),
        }

    def talk(self) -> None:
        """Until /exit or the end of the input."""
        say(TOLD, self.person)
        for text in self._lines():
            if text == "/exit":
                return
            if text in self.commands:
                self.commands[text]()
            elif text.startswith("/"):
                say(f"there is no {text.split()[0]}; /help tells what there is")
            elif text:
                self._answer(text)

    def _lines(self) -> Iterator[str]:
        while True:
            try:
                yield self._read()
            except EOFError:
                return
            except KeyboardInterrupt:
                say("\n/exit or Ctrl-D ends the chat")

    def _read(self) -> str:
        """A message, of one line or several."""
        lines = [input("> " if self.person else "")]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(input("  " if self.person else ""))
        return "\n".join(lines).strip()

    def _answer(self, text: str) -> None:
        with process.handling({signal.SIGINT: lambda *_: self.chat.stop()}):
            try:
                for part in self.chat.reply(text):
                    print(part, end="", flush=True)
                print(flush=True)
                if self.chat.truncated:
                    limit = self.chat.config.of_tokens.max_new_tokens
                    say(f"(the answer was cut at {limit:,} tokens: raise --max-new-tokens)")
            except ValueError as error:
                say(str(error))

    def _reset(self) -> None:
        self.chat.reset()
        say("the chat begins anew")

    def _retry(self) -> None:
        text = self.chat.undo()
        if text is None:
            say("nothing was said yet")
        else:
            self._answer(text)

    def _history(self) -> None:
        for one in self.chat.messages:
            say(f"{one['role']}: {one['content']}")
