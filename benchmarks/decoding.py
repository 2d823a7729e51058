"""Speed of decoding beside its peers: dolmen (plain, and with --compile), transformers (eager) and
llama.cpp, with the same weights, prompts and numbers of tokens.

    python -m benchmarks.decoding --llama-cpp BUILD/bin              all sizes and batches
    python -m benchmarks.decoding --sizes 20M --batches 1 16         without llama.cpp
    python -m benchmarks.decoding --llama-cpp BUILD/bin --serve      the two HTTP servers

Sides take turns in each round, and a number is the median over rounds. `step` is the milliseconds
of one decode step of the whole batch: a generation of all new tokens minus one of a single token,
divided by the steps between them. For llama.cpp its own `llama-batched-bench` measures the same.
`of floor` is the least time in which the bytes of weights and KV cache can be read (at the
bandwidth of a sum over 1 GiB in the same round), divided by the time of a step. The ragged rows
have prompts of 16 to 512 tokens, and their number is the tokens per second of the whole generation:
dolmen takes the prompts as they come, transformers sorted by length and padded on the left, and
llama.cpp over HTTP to its own server.

BUILD is a folder in which llama.cpp was built (`cmake --build BUILD --target llama-batched-bench
llama-server`); its weight files are written here by the package `gguf`.
"""

import argparse
import contextlib
import http.client
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from benchmarks.generate import Side, Work, dolmen_side, transformers_side
from dolmen.conversion.source import open_source
from dolmen.parallel.inference_linear import Weights
from dolmen.serving.engine import load_decoder

SIZES = {  # hidden, intermediate, layers, heads, KV heads
    "20M": (384, 1024, 8, 6, 3),
    "120M": (768, 2048, 12, 12, 4),
    "500M": (1280, 3584, 24, 20, 5),
}
VOCABULARY = 16384
POSITIONS = 1024
PROMPT = 32
NEW = 128
RAGGED = "ragged"
LLAMA_CPP_TYPES = ("F32", "BF16", "F16", "Q8_0")


def model_folder(size: str, folder: Path) -> Path:
    """Write a Llama model with random weights and a tokenizer of words to `folder`."""
    hidden, intermediate, layers, heads, kv_heads = SIZES[size]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)
    return folder


def write_gguf(model: LlamaForCausalLM, path: Path, kind: str) -> None:
    """Write a Llama model in llama.cpp's format, its matrices as `kind` of LLAMA_CPP_TYPES."""
    import gguf  # pyright: ignore[reportMissingImports]

    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("llama")
    tokens = [f"w{i}" for i in range(config.vocab_size)]
    tokens[:257] = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * config.vocab_size)
    types = gguf.TokenType
    kinds = [types.UNKNOWN] + [types.BYTE] * 256
    writer.add_token_types(kinds + [types.NORMAL] * (config.vocab_size - len(kinds)))
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)
    block = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    for layer in range(config.num_hidden_layers):
        names |= {f"model.layers.{layer}.{a}": f"blk.{layer}.{b}" for a, b in block.items()}
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, weight in model.state_dict().items():
        module = name.removesuffix(".weight")
        count = heads.get(module.rsplit(".", 1)[-1])
        if count:  # llama.cpp rotates neighbouring pairs, transformers the two halves of a head
            weight = weight.unflatten(0, (count, 2, -1)).transpose(1, 2).flatten(0, 2)
        stored = gguf.GGMLQuantizationType[kind if weight.dim() == 2 else "F32"]
        data = gguf.quants.quantize(weight.float().contiguous().numpy(), stored)
        writer.add_tensor(names[module] + ".weight", data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@dataclass(frozen=True)
class Column:
    """A program and a dtype whose speed is measured."""

    name: str
    bytes_per_weight: float
    cache_bytes: int
    """Per number of the KV cache."""
    step_ms: Callable[[int], float]
    """Milliseconds of a decode step with that many sequences."""
    rate: Callable[[Work], float] | None
    """Tokens per second of a whole generation; None: not measured."""


def engine_column(name: str, bytes_per_weight: float, cache_bytes: int, side: Side) -> Column:
    """A column whose program runs in this process."""

    def seconds(work: Work) -> float:
        start = time.perf_counter()
        side(work)
        return time.perf_counter() - start

    def step_ms(batch: int) -> float:
        prompts = draw_prompts([PROMPT] * batch)
        long, short = (seconds([(prompt, new) for prompt in prompts]) for new in (NEW, 1))
        return (long - short) / (NEW - 1) * 1e3

    def rate(work: Work) -> float:
        return sum(new for _, new in work) / seconds(work)

    return Column(name, bytes_per_weight, cache_bytes, step_ms, rate)


def draw_prompts(lengths: Sequence[int]) -> list[list[int]]:
    """Random prompts of these lengths, the same at each call."""
    chance = torch.Generator().manual_seed(1)
    return [torch.randint(1, VOCABULARY, (n,), generator=chance).tolist() for n in lengths]


def ragged(rows: int) -> Work:
    """`rows` prompts of 16 to 512 tokens, with NEW new tokens each."""
    lengths = torch.randint(16, 513, (rows,), generator=torch.Generator().manual_seed(2))
    return [(prompt, NEW) for prompt in draw_prompts(lengths.tolist())]


def llama_cpp_column(programs: Path, file: Path, kind: str, threads: int) -> Column:
    """llama.cpp with the weights in `file`."""

    def step_ms(batch: int) -> float:
        # the program may end before it has printed its last line, which is that of one token
        out = subprocess.run(
            [
                str(programs / "llama-batched-bench"), "-m", str(file), "-c",
                str(batch * (PROMPT + NEW) + 64), "-npp", str(PROMPT), "-ntg", f"{NEW},1", "-npl",
                str(batch), "-t", str(threads), "-tb", str(threads), "-b", "4096",
                "--output-format", "jsonl",
            ],
            capture_output=True,
            text=True,
            check=True,
        ).stdout  # fmt: skip
        lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
        return next(line["t_tg"] for line in lines if line["tg"] == NEW) / NEW * 1e3

    def rate(work: Work) -> float:
        with llama_cpp_server(programs, file, len(work), threads) as address:
            return load(address, None, [[item] for item in work]).tokens_per_second

    weight_bytes = {"F32": 4, "Q8_0": 34 / 32}.get(kind, 2)
    return Column(f"llama.cpp {kind}", weight_bytes, 2, step_ms, rate)


@contextlib.contextmanager
def server(command: list[str], port: int) -> Iterator[str]:
    """Run an HTTP server until the block ends; yields its address once it answers."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            for _ in range(600):
                with contextlib.suppress(OSError):
                    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
                    connection.request("GET", "/health")
                    if connection.getresponse().status == 200:
                        break
                if process.poll() is not None:
                    log.seek(0)
                    sys.exit(f"{command[0]} ended:\n{log.read().decode()[-2000:]}")
                time.sleep(0.2)
            yield f"127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def llama_cpp_server(programs: Path, file: Path, slots: int, threads: int):
    port = free_port()
    return server(
        [
            str(programs / "llama-server"), "-m", str(file), "--port", str(port), "-np",
            str(slots), "-c", str(slots * (512 + NEW)), "-t", str(threads), "-tb", str(threads),
            "-b", "4096", "--no-webui",
        ],
        port,
    )  # fmt: skip


def dolmen_server(folder: Path, kind: str) -> contextlib.AbstractContextManager[str]:
    port = free_port()
    options = ["--weights", "int8"] if kind == "int8" else ["--dtype", kind]
    command = [sys.executable, "-m", "dolmen", "serve", str(folder), "--port", str(port)]
    return server([*command, "--key", "benchmark", "--name", "m", *options], port)


@dataclass(frozen=True)
class Load:
    """What clients of a server saw."""

    tokens_per_second: float
    median_seconds: float
    """Of a request."""
    worst_seconds: float


def load(address: str, key: str | None, clients: Sequence[Work]) -> Load:
    """Send each client's requests one after the other, all clients at once."""

    def run(work: Work) -> list[float]:
        seconds = []
        for prompt, new in work:
            body = {"prompt": prompt, "max_tokens": new, "temperature": 0, "ignore_eos": True}
            if key is not None:
                body = {"model": "m", "prompt": prompt, "max_tokens": new, "temperature": 0}
            start = time.perf_counter()
            connection = http.client.HTTPConnection(address, timeout=3600)
            headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            answer = json.loads(connection.getresponse().read())
            if answer.get("usage", {}).get("completion_tokens") != new:
                sys.exit(f"{address} answered {answer}, not {new} tokens")
            seconds.append(time.perf_counter() - start)
        return seconds

    start = time.perf_counter()
    with ThreadPoolExecutor(len(clients)) as pool:
        seconds = sorted(s for each in pool.map(run, clients) for s in each)
    total = sum(new for work in clients for _, new in work)
    return Load(total / (time.perf_counter() - start), statistics.median(seconds), seconds[-1])


def read_bandwidth() -> float:
    """Bytes per second of a sum over 1 GiB."""
    data = torch.ones(2**28)
    data.sum()
    start = time.perf_counter()
    data.sum()
    return 2**30 / (time.perf_counter() - start)


KINDS = ("float32", "bfloat16", "int8")


def columns(folder: Path, options: argparse.Namespace) -> list[Column]:
    """All programs and dtypes, loaded."""
    found: list[Column] = []
    for kind in options.kinds:
        source = open_source(folder)
        dtype = torch.float32 if kind == "int8" else getattr(torch, kind)
        size = {"float32": 4, "bfloat16": 2, "int8": 1}[kind]
        weights: Weights = "int8" if kind == "int8" else "stated"
        model = load_decoder(source, dtype=dtype, weights=weights)
        for compiled in (False, True)[: 1 + options.compiled]:
            name = f"dolmen {kind}{', compiled' if compiled else ''}"
            side = dolmen_side(model, weights, compile=compiled)
            found.append(engine_column(name, size, dtype.itemsize, side))
        if kind == "int8":
            continue
        theirs = LlamaForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        found.append(engine_column(f"transformers {kind}", size, size, transformers_side(theirs)))
    if options.llama_cpp is not None:
        theirs = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for kind in options.types:
            file = folder / f"{kind}.gguf"
            write_gguf(theirs, file, kind)
            found.append(llama_cpp_column(options.llama_cpp, file, kind, options.threads))
    return found


def measure(size: str, folder: Path, options: argparse.Namespace) -> None:
    """Print a table of a size: a line per program and dtype, a column per batch."""
    hidden, intermediate, layers, heads, kv_heads = SIZES[size]
    kv = hidden // heads * kv_heads
    matrices = layers * (2 * hidden * (hidden + kv) + 3 * hidden * intermediate)
    matrices += VOCABULARY * hidden  # the head; of the embedding a token reads one row
    sides = columns(model_folder(size, folder), options)
    batches = [int(batch) for batch in options.batches if batch != RAGGED]
    times: dict[tuple[str, int], list[float]] = {}
    rates: dict[str, list[float]] = {}
    bandwidths = []
    for turn in range(options.rounds + 1):  # the first one warms up
        if turn:
            bandwidths.append(read_bandwidth())
        for side in sides:
            for batch in batches:
                times.setdefault((side.name, batch), []).append(side.step_ms(batch))
            if RAGGED in options.batches and side.rate is not None:
                rates.setdefault(side.name, []).append(side.rate(ragged(options.rows)))
    bandwidth = statistics.median(bandwidths)
    print(f"{size}: {matrices / 1e6:.0f} M weights read per step, {bandwidth / 1e9:.1f} GB/s")
    for side in sides:
        line = f"  {side.name:32s}"
        for batch in batches:
            ms = statistics.median(times[side.name, batch][1:])
            cache = 2 * layers * kv * side.cache_bytes * batch * (PROMPT + NEW / 2)
            floor = (matrices * side.bytes_per_weight + cache) / bandwidth * 1e3
            line += f"  {batch:2d}: {ms:7.2f} ms ({floor / ms:4.0%})"
        if side.name in rates:
            line += f"  ragged: {statistics.median(rates[side.name][1:]):6.1f} tokens/s"
        print(line, flush=True)


def serve(size: str, folder: Path, options: argparse.Namespace) -> None:
    """Print a line per server and number of clients."""
    model_folder(size, folder)
    for clients in options.clients:
        work = [ragged(clients * 2)[i::clients] for i in range(clients)]
        for kind in options.kinds:
            with dolmen_server(folder, kind) as address:
                report(
                    f"{size}, {clients} clients: dolmen serve {kind}",
                    load(address, "benchmark", work),
                )
        if options.llama_cpp is not None:
            theirs = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
            for kind in options.types:
                write_gguf(theirs, folder / f"{kind}.gguf", kind)
                with llama_cpp_server(
                    options.llama_cpp, folder / f"{kind}.gguf", clients, options.threads
                ) as address:
                    report(
                        f"{size}, {clients} clients: llama-server {kind}", load(address, None, work)
                    )


def report(name: str, result: Load) -> None:
    print(
        f"{name:48s} {result.tokens_per_second:7.1f} tokens/s, a request takes "
        f"{result.median_seconds:.1f} s (median), {result.worst_seconds:.1f} s (worst)",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--batches", nargs="+", default=["1", "4", "16", "64", RAGGED])
    parser.add_argument("--rows", type=int, default=32, help="prompts of a ragged batch")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--compiled", action="store_true", help="dolmen --compile, too")
    parser.add_argument("--llama-cpp", type=Path, help="folder with llama.cpp's programs")
    parser.add_argument("--types", nargs="+", choices=LLAMA_CPP_TYPES, default=["F16", "Q8_0"])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="of dolmen")
    parser.add_argument("--serve", action="store_true", help="measure the servers")
    parser.add_argument("--clients", nargs="+", type=int, default=[16, 64])
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    disable_progress_bar()
    torch.set_num_threads(options.threads)
    print(f"torch {torch.__version__}, {options.threads} thread(s), {options.rounds} rounds")
    for size in options.sizes:
        with tempfile.TemporaryDirectory() as folder:
            (serve if options.serve else measure)(size, Path(folder), options)


if __name__ == "__main__":
    main()
