"""One forward of the texts that an engine runs: their unread tokens in, scores of what follows out.

    tokens -> stage 0 -> x -> ... -> last stage -> hidden of each text's last token -> scores

Of a pipeline each rank calls this with the same texts, computes its stage, and sends on what comes
of it. The last stage has the scores, the others have none. Scores are made of the hidden vectors
that somebody asked for alone: of what a prompt's other tokens foretell, nothing is computed, and
their log-probabilities, where those are asked for, by chunks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from jaxtyping import Float, Int64
from torch import Tensor

from dolmen.core import collectives, transfers
from dolmen.core.device import send
from dolmen.core.mesh import Mesh
from dolmen.model.decoder import Decoder
from dolmen.model.head import End, Logits
from dolmen.model.tree import Span
from dolmen.parallel import several, vocabulary
from dolmen.serving import sample
from dolmen.serving.adapters import Adapters
from dolmen.serving.cache import Cache, Reading

AT_ONCE = 1 << 22  # scores that are held at once where a prompt's log-probabilities are asked for


@dataclass(frozen=True)
class Part:
    """What is read of a text in a forward."""

    tokens: Sequence[int]
    """So many next ones, at least one."""
    last: bool
    """Whether the scores of what follows them are asked for."""
    labels: Sequence[int] = ()
    """What is known to follow some of them, where the log-probabilities of that are asked for."""
    first: int = 0
    """The index, among `tokens`, of the one that the first label follows."""
    top: int = 0
    """Log-probabilities of so many likeliest tokens are asked for beside a label's."""
    span: Span | None = None
    """How its tokens stand, where not each stands at its index and sees back alone."""
    length: int = 1
    """What the text is taken to be long, where that tells how its tokens are turned."""
    adapter: str | None = None
    """What reads them beside the base."""


@dataclass(frozen=True, eq=False)
class Scores:
    """Of a forward, fp32 or wider; on the last stage alone."""

    following: Float[Tensor, "texts vocabulary"]
    labelled: dict[int, Float[Tensor, "labels numbers"]]
    """Of each text whose tokens have labels: see `sample.log_probabilities`."""


class Forward:
    """Of one model, its cache and its pipeline."""

    def __init__(self, model: Decoder, mesh: Mesh, page: int, adapters: Adapters):
        self.model, self.mesh, self.cache = model, mesh, Cache(model.tree, page)
        self.adapters = adapters
        self._going: list[tuple[dist.Work, Tensor]] = []

    def read(self, parts: Mapping[int, Part]) -> tuple[list[int], Scores | None]:
        """Reads `parts` of texts into the cache. -> The texts whose next token is asked for, in the
        order of their scores; and these, on the last stage.
        """
        tp, device = self.model.tp, self.model.device
        # sequence parallelism splits tokens evenly: fill up with some that nobody reads
        multiple = tp.axis.size if tp.sequence else 1
        reading = self.cache.read(
            {text: len(part.tokens) for text, part in parts.items()},
            device,
            multiple,
            {text: part.span for text, part in parts.items() if part.span is not None},
            {text: part.length for text, part in parts.items()},
        )
        tokens = [token for text in reading.texts for token in parts[text].tokens]
        tokens += [0] * (reading.positions.shape[2] - len(tokens))
        sent = send(torch.tensor([tokens]), device)
        if self.adapters.names:
            own = [parts[text] for text in reading.texts]
            names, counts = [part.adapter for part in own], [len(part.tokens) for part in own]
            self.adapters.turn.segments = several.segments(names, counts, device)
        texts = [text for text in reading.texts if parts[text].last]
        here = self.model.split.parts[0]
        x = None if here.first else self._received(len(tokens))
        if here.last:
            made = self.model(sent, _end(self.model, reading, parts), reading, x=x)
            return texts, Scores(*made)
        made = self.model(sent, None, reading, x=x).contiguous()
        self._going.append((transfers.start_send(made, self.mesh.up, self.mesh.pp.rank + 1), made))
        return texts, None

    def finish(self) -> None:
        """Waits until all that was sent has left."""
        for work, _ in self._going:
            work.wait()
        self._going.clear()

    def _received(self, tokens: int) -> Float[Tensor, "here hidden"]:
        """What the stage before has made."""
        x = self.model.boundary(1, tokens)
        transfers.start_receive(x, self.mesh.up, self.mesh.pp.rank - 1).wait()
        return x


def _end(model: Decoder, reading: Reading, parts: Mapping[int, Part]) -> End:
    """The end of the model: what `Scores` has."""
    device, begin, first = reading.last.device, {}, 0
    for text in reading.texts:
        begin[text] = first
        first += len(parts[text].tokens)
    asked = [k for k, text in enumerate(reading.texts) if parts[text].last]
    rows = reading.last[send(torch.tensor(asked, dtype=torch.int64), device)]

    def end(hidden: Tensor, head: Logits) -> tuple[Tensor, dict[int, Tensor]]:
        whole, head = _together(hidden, head)
        labelled = {}
        for text, part in parts.items():
            if part.labels:
                start = begin[text] + part.first
                own = whole[start : start + len(part.labels)]
                labels = send(torch.tensor(part.labels), device)
                labelled[text] = _labelled(model, own, head, labels, part.top)
        return _scores(model, whole[rows], head), labelled

    return end


def _together(hidden: Tensor, head: Logits) -> tuple[Float[Tensor, "tokens hidden"], Logits]:
    """Hidden vectors of all tokens, and a head that takes any of them."""
    tp = head.split.tp
    if not tp.gathers:
        return hidden, head
    split = replace(head.split, tp=replace(tp, sequence=False))
    return collectives.all_gather(hidden, 0, tp.axis), replace(head, split=split)


def _scores(
    model: Decoder, hidden: Float[Tensor, "rows hidden"], head: Logits
) -> Float[Tensor, "rows vocabulary"]:
    logits = head.logits(hidden)[0]
    whole = vocabulary.gather_vocabulary(logits, model.tree.vocab_size, model.tp.axis)
    return whole if whole.dtype == torch.float64 else whole.float()


def _labelled(
    model: Decoder,
    hidden: Float[Tensor, "labels hidden"],
    head: Logits,
    labels: Int64[Tensor, " labels"],
    top: int,
) -> Float[Tensor, "labels numbers"]:
    chunk = max(1, AT_ONCE // model.tree.vocab_size)
    return torch.cat(
        [
            sample.log_probabilities(_scores(model, some, head), own, top)
            for some, own in zip(hidden.split(chunk), labels.split(chunk), strict=True)
        ]
    )
