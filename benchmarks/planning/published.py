"""Published runs, a row each (runs/*.csv, or files of the user). No row is fatal: a value that is
not understood is left empty, with a warning.
"""

import csv
import io
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from dolmen.files import gate

FOLDER = Path(__file__).with_name("runs")
COLUMNS = (
    "row_id dataset verified gpu gpu_mem_gb gpus_per_node num_gpus interconnect framework model "
    "params_b layers hidden heads kv_heads ffn seq vocab tp pp vp dp cp ep mbs gbs precision "
    "recompute seq_parallel zero_or_fsdp schedule step_time_s tflops_per_gpu flops_convention "
    "mfu_pct hfu_pct tokens_s_gpu mem_gib mem_kind status notes source"
).split()
COUNTS = (
    "num_gpus gpus_per_node layers hidden heads kv_heads ffn seq vocab tp pp vp dp cp ep mbs gbs"
).split()
AMOUNTS = (
    "gpu_mem_gb params_b step_time_s tflops_per_gpu mfu_pct hfu_pct tokens_s_gpu mem_gib"
).split()
# what no run of any year has more of: above it the unit is another
MOST = {
    "gpu_mem_gb": 10_000,
    "step_time_s": 1e5,
    "tflops_per_gpu": 1e5,
    "tokens_s_gpu": 1e7,
    "mfu_pct": 100,
    "hfu_pct": 100,
    "mem_gib": 10_000,
    "params_b": 1e6,
    "num_gpus": 1e6,
    "layers": 1e4,
}
# and less: below it a ratio to it is no number that says anything
LEAST = {"step_time_s": 1e-5, "tokens_s_gpu": 1e-3, "tflops_per_gpu": 1e-3}
NUMBER = r"((?:[0-9]{1,3}(?:[,_][0-9]{3})+|[0-9]+)\.?[0-9]*(?:[eE][-+]?[0-9]+)?)"
_COUNTED = {"": 1.0, "k": 1000.0, "m": 1e6}
_OF_TOKENS = {"": 1.0, "k": 1024.0, "tokens": 1.0}
UNITS: dict[str, dict[str, float]] = {
    **dict.fromkeys(COUNTS, _COUNTED),
    "seq": _OF_TOKENS,
    "gpu_mem_gb": {"": 1, "gb": 1, "gib": 1},
    "mem_gib": {"": 1, "gib": 1, "gb": 1e9 / 2**30},
    "params_b": {"": 1, "b": 1, "m": 1e-3, "t": 1e3},
    "step_time_s": {"": 1, "s": 1, "sec": 1, "seconds": 1, "ms": 1e-3, "min": 60},
    "tflops_per_gpu": {"": 1, "tflops": 1, "tflop/s": 1, "tflops/s": 1, "pflops": 1e3},
    "tokens_s_gpu": {"": 1, "k": 1e3, "tokens/s": 1, "tok/s": 1},
    "mfu_pct": {"": 1, "%": 1},
    "hfu_pct": {"": 1, "%": 1},
}
"""Of a column what may stand behind a number, and what it is multiplied by."""
WORDS = {
    "precision": {"fp16": "fp16", "bf16": "bf16", "fp8": "fp8", "fp32": "fp32", "tf32": "tf32"},
    "seq_parallel": {"yes": "yes", "no": "no", "true": "yes", "false": "no"},
    "status": {"ok": "ok", "oom": "oom"},
}


@dataclass(frozen=True)
class Published:
    """A row as it is understood; None where the source does not say."""

    row_id: str
    dataset: str
    gpu: str
    framework: str
    model: str
    text: str
    """All of the row: where a remark says what no column does. In lower case, beside the cell of
    its network, which comes once more as it is."""
    numbers: dict[str, float]
    """Of COUNTS and AMOUNTS, those that are said."""
    precision: str | None
    recompute: str | None
    """none, selective, op, full."""
    sequence_parallel: bool | None
    zero: int | None
    schedule: str | None
    status: str
    warnings: list[str] = field(default_factory=list)

    def count(self, name: str) -> int | None:
        value = self.numbers.get(name)
        return None if value is None else int(value)

    @property
    def batch(self) -> int | None:
        """Sequences of the global batch: gbs, else those of one microbatch of each replica."""
        gbs, dp, mbs = self.count("gbs"), self.count("dp"), self.count("mbs")
        return gbs if gbs or not dp or not mbs else dp * mbs

    @property
    def block_alone(self) -> bool:
        """Whether the run is one layer by itself, neither ends nor update (2205.05198, Table 4)."""
        return self.count("layers") == 1

    def measured(self, peak: float | None = None) -> float | None:
        """Seconds of a step: step_time_s, else from tokens_s_gpu, else from tflops_per_gpu, mfu_pct
        or hfu_pct (of `peak`, FLOPs per second of a GPU) and what counts as a FLOP.
        """
        said, gpus, batch, length = (
            self.numbers,
            self.count("num_gpus"),
            self.batch,
            self.count("seq"),
        )
        if "step_time_s" in said:
            return said["step_time_s"]
        if not (gpus and batch and length):
            return None
        if "tokens_s_gpu" in said:
            return batch * length / (said["tokens_s_gpu"] * gpus)
        if "tflops_per_gpu" in said and (flops := self.flops(self.counts_again)):
            return flops / (said["tflops_per_gpu"] * 1e12 * gpus)
        of_peak = self.share_of_peak
        if peak and of_peak and self.text_of_convention and (flops := self.flops(of_peak[0])):
            return flops / (of_peak[1] * peak * gpus)
        return None

    @property
    def share_of_peak(self) -> tuple[bool, float] | None:
        """(whether it counts what is computed again, MFU or HFU as a share), where one is said."""
        for name, again in (("mfu_pct", False), ("hfu_pct", True)):
            if name in self.numbers:
                return again, self.numbers[name] / 100
        return None

    @property
    def counts_again(self) -> bool:
        """Whether the row's FLOPs have what is computed again: it says hardware, or is of a year in
        which nobody counted otherwise (1909.08053).
        """
        convention = self.text_of_convention
        return "hardware" in convention or "sustained" in convention

    def flops(self, again: bool) -> float | None:
        """Of a step, by the row's convention: 6 for each parameter and token where it says 6N, else
        of all products, attention by the half where it says causal; `again`: with those that full
        recomputation does.
        """
        h, layers, heads = (self.count(n) for n in ("hidden", "layers", "heads"))
        length, batch, parameters = self.count("seq"), self.batch, self.numbers.get("params_b")
        times = 4 if again and self.recompute == "full" else 3
        convention = self.text_of_convention
        if length and batch and parameters and re.search(r"\b6 ?[*x·]? ?(n|p)d?\b", convention):
            return 2 * times * parameters * 1e9 * batch * length
        if not (h and layers and length and batch):
            return None
        half = "causal" in convention and "non-causal" not in convention
        kv = self.count("kv_heads") or heads or 1
        ffn, vocab = self.count("ffn") or 4 * h, self.count("vocab") or 51200
        gated = 3 if is_gated(self) else 2
        matrices = 2 * h * h * (2 + 2 * kv / (heads or kv)) + 2 * gated * h * ffn
        layer = matrices + 4 * length * h / (2 if half else 1)
        return batch * length * (times * layers * layer + 6 * h * vocab)

    @property
    def month(self) -> int | None:
        """Of the source, 2104 for April 2021, by the number that arXiv gave it; None where that is
        not said.
        """
        found = re.search(r"arxiv:?\s*([0-9]{2}(?:0[1-9]|1[0-2]))\.[0-9]{4,5}", self.text_of_source)
        return int(found[1]) if found else None

    @property
    def text_of_source(self) -> str:
        return self.text.split("\0")[-1]

    @property
    def text_of_convention(self) -> str:
        return self.text.split("\0")[0]

    @property
    def text_of_network(self) -> str:
        return self.text.split("\0")[1]


def read_rows(files: Iterable[Path | str]) -> list[Published]:
    """Of CSV files, in order. Raises Refused for a file that is none, or has no row."""
    rows = []
    for file in files:
        text = gate.read_text(file, 64 * gate.MIB)
        try:
            found = list(csv.DictReader(io.StringIO(text, newline="")))
        except csv.Error as error:
            raise gate.refuse(file, f"is not CSV: {error}") from error
        if not found:
            raise gate.refuse(file, "has no row below its names of columns")
        if "num_gpus" not in found[0]:
            raise gate.refuse(file, f"has no column num_gpus: they are {', '.join(COLUMNS)}")
        rows += [understood(row, Path(file).stem, i) for i, row in enumerate(found)]
    return rows


def understood(row: dict[str, str | None], stem: str, index: int) -> Published:
    """One row. What it says and nobody knows is left empty, with a warning."""
    cells = {name: (row.get(name) or "").strip() for name in COLUMNS}
    warnings = [f"column {name!r} is not known" for name in row if name and name not in COLUMNS]
    if None in row:
        warnings.append("more cells than columns")
    numbers = {}
    for name in (*COUNTS, *AMOUNTS):
        value = _number(name, bare(cells[name]), warnings)
        if value is not None:
            numbers[name] = value
    lower = [cells[name].lower() for name in COLUMNS]
    # GB are bytes and Gb are bits
    text = "\0".join((cells["flops_convention"].lower(), cells["interconnect"], *lower))
    chosen = _vp_of(cells["schedule"], numbers)
    return Published(
        cells["row_id"] or f"{stem}#{index}",
        bare(cells["dataset"]) or stem,
        cells["gpu"],
        cells["framework"],
        cells["model"],
        text,
        numbers | chosen,
        _precision(cells["precision"], warnings),
        _recompute(bare(cells["recompute"]).lower(), cells["recompute"].lower(), warnings),
        {"yes": True, "no": False, None: None}[_word("seq_parallel", cells, warnings)],
        _zero(bare(cells["zero_or_fsdp"]).lower(), warnings),
        _schedule(bare(cells["schedule"]).lower(), warnings),
        _word("status", cells, warnings) or "ok",
        warnings,
    )


def bare(text: str) -> str:
    """Without what stands in brackets."""
    previous = None
    while previous != text:
        previous, text = text, re.sub(r"\([^()]*\)|\[[^\[\]]*\]", " ", text)
    return " ".join(text.split())


def _number(name: str, text: str, warnings: list[str]) -> float | None:
    """With its column's unit or another of the same kind behind it; of a range the middle."""
    if not text or text.lower() in ("n/a", "n.a.", "na", "-", "none", "null", "?", "unknown"):
        return None
    text = re.sub(r"(?<=[0-9])[ \u00a0\u202f](?=[0-9]{3}\b)", "", text)  # 1 024
    found = re.fullmatch(rf"[~<>=≈\s]*{NUMBER}(?:\s*[-–]\s*{NUMBER})?\s*([^0-9]*)", text)
    unit = UNITS.get(name, {}).get(found[3].strip().lower()) if found else None
    if found is None or unit is None:
        return _empty(name, text, "is no number", warnings)
    value = _plain(found[1])
    if found[2]:
        value = (value + _plain(found[2])) / 2
        warnings.append(f"{name} {text[:40]!r} is a range: taken for its middle")
    value *= unit
    if name in COUNTS and not (1 <= value <= 1e9 and value == int(value)):
        return _empty(name, text, "is no count", warnings)
    if not LEAST.get(name, 0) < value <= MOST.get(name, 1e9):
        return _empty(name, text, "cannot be in its unit", warnings)
    return value


def _plain(text: str) -> float:
    return float(text.replace(",", "").replace("_", ""))


def _empty(name: str, text: str, why: str, warnings: list[str]) -> None:
    warnings.append(f"{name} {text[:40]!r} {why}: taken as empty")


def _word(name: str, cells: dict[str, str], warnings: list[str]) -> str | None:
    text = bare(cells[name]).lower()
    if not text:
        return None
    if text in WORDS[name]:
        return WORDS[name][text]
    return _empty(name, text, "is not known", warnings)


def _precision(text: str, warnings: list[str]) -> str | None:
    """Of "bf16/fp16" the first; fp8 where it is said at all."""
    words = re.findall(r"(?:mx)?fp8|bf16|fp16|fp32|tf32", text.lower())
    if any("fp8" in word for word in words):
        return "fp8"
    if words:
        return words[0]
    return _empty("precision", text, "is not known", warnings) if bare(text) else None


def _recompute(text: str, whole: str, warnings: list[str]) -> str | None:
    if not text:
        return None
    if text.startswith("selective"):
        return "op" if "op" in re.findall(r"[a-z]+", whole) else "selective"
    for word in ("none", "no", "full"):
        if text.startswith(word):
            return {"no": "none"}.get(word, word)
    return _empty("recompute", text, "is not known", warnings)


def _zero(text: str, warnings: list[str]) -> int | None:
    if not text:
        return None
    if text in ("none", "no", "ddp", "zero0"):
        return 0
    if text in ("0", "1", "2", "3"):
        return int(text)
    if "zero2" in text or "zero-2" in text:
        return 2
    if "zero1" in text or "zero-1" in text or "distopt" in text or "distributed opt" in text:
        return 1
    if "zero3" in text or "zero-3" in text or "fsdp" in text:
        return 3
    return _empty("zero_or_fsdp", text, "is not known", warnings)


def _schedule(text: str, warnings: list[str]) -> str | None:
    if not text:
        return None
    known = {"none": "none", "no": "none", "gpipe": "gpipe", "1f1b": "1f1b"}
    if text in known:
        return known[text]
    for word, name in (("interleaved", "interleaved"), ("zero-bubble", "zero-bubble")):
        if text.startswith(word):
            return name
    return _empty("schedule", text, "is not known", warnings)


def _vp_of(schedule: str, numbers: dict[str, float]) -> dict[str, float]:
    """Virtual stages that the schedule's name says: "interleaved 1F1B v=6"."""
    found = re.search(r"\bv\s*=\s*([0-9]{1,3})\b", schedule.lower())
    return {"vp": float(found[1])} if found and int(found[1]) and "vp" not in numbers else {}


def is_gated(row: Published) -> bool:
    """Llama's kind of block: rows say gpt or llama in the model's name."""
    words = ("llama", "mistral", "mixtral", "qwen", "deepseek", "gemma", "palm", "swiglu", "glu ")
    return any(word in row.model.lower() for word in words)
