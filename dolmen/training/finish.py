"""The end of a run: export, verification against transformers, a sample, the summary."""

import shlex
from pathlib import Path

from rich.console import Console
from rich.table import Table

from dolmen.checkpoint.remote import Superseded
from dolmen.conversion.convert import export_model
from dolmen.conversion.source import open_source
from dolmen.core.filesystem import is_url
from dolmen.core.log import console, duration
from dolmen.core.mesh import SINGLE
from dolmen.core.messages import Failed, plural
from dolmen.data import tokenizer as tokenizers
from dolmen.data.sources import gzip_xz_bits
from dolmen.files import gate, kinds, storage
from dolmen.training import evaluate, folder, goodput, mirror
from dolmen.training.config import RunConfig


def finish(run: RunConfig, out: Path) -> int:
    """Do what --finish asks for after a run has ended, in one process, from its files in `out`:
    export the newest checkpoint, compare it with transformers, print a sample; upload the results
    if the run has a URL; print the summary. Return the exit code: 1 if the exported model differs
    from that in transformers, else 0.
    """
    screen = console()
    outcome = gate.read_json(out / "summary.json", kinds.SUMMARY)
    hf = out / "hf"
    if run.finish.export:
        _export(out, hf)
    report = None
    if run.finish.verify:
        from dolmen.evaluation.verify import verify

        report = verify(open_source(hf), mesh=SINGLE)
        screen.print()
        screen.print(report.table())
    if run.finish.sample is not None:
        _sample(screen, hf, run.finish.sample)
    if run.checkpoint.to is not None:
        exported = hf if run.finish.export else None
        _upload(run.checkpoint.to, out, exported, outcome["writer"])
    screen.print()
    screen.print(_summary(run, outcome, out, report))
    return 0 if report is None or report.ok else 1


def _upload(url: str, out: Path, exported: Path | None, writer: str) -> None:
    """Upload the files in the folder of a run that has ended to its URL, and its `exported` model
    (None: none). `writer`: the line with which it has claimed the URL. Raises Failed where the
    storage does not take them, or another run has claimed it.
    """
    try:
        mirror.push_result(url, out, exported, writer)
    except Superseded as error:
        raise Failed(f"the run is complete in {out}, but not at its URL: {error}", True) from None
    except storage.StorageError as error:
        raise Failed(
            f"the run is complete in {out}, but not at its URL: {error}; --resume uploads it again"
        ) from None


def _export(out: Path, to: Path) -> None:
    """Export the newest checkpoint of the run in `out` as a transformers directory, the folder
    `to`, after deleting an earlier export; list the files as written by dolmen. Raises Failed if
    that folder holds files that dolmen did not write.
    """
    try:
        folder.remove_export(out)
    except folder.Unusable as error:
        raise Failed(str(error), final=True) from None
    folder.claim(out, to.name)
    export_model(out, to)
    folder.claim_files(out, to.name)


def _sample(screen: Console, folder: Path, prompt: str) -> None:
    """Load the exported model in `folder`, generate a continuation of `prompt` (at most 96 tokens,
    temperature 0.7, top-p 0.95), and print both.
    """
    from dolmen.serving import engine
    from dolmen.serving.config import GenerateConfig
    from dolmen.serving.generation import generate_tokens

    tokenizer = tokenizers.load_tokenizer(str(folder))
    source = open_source(folder)
    model = engine.load_decoder(source)
    tokens = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    max_new = model.spec.max_position_embeddings - len(tokens)
    # greedy text of a small model repeats itself, so it is sampled
    config = GenerateConfig(
        folder=str(folder), max_new_tokens=min(96, max_new), temperature=0.7, top_p=0.95
    )
    (new,) = generate_tokens(model, tokenizer, source, [tokens], config)
    screen.print()
    screen.rule("a sample, temperature 0.7", align="left", characters="-")
    screen.print(prompt + tokenizer.decode(new, skip_special_tokens=True))
    screen.rule(characters="-")


def _validation(run: RunConfig, outcome: dict) -> str:
    """Return a text about the last validation of the run for the final summary: loss with its unit,
    how much of the validation split was read, and after which step unless the last. `outcome`: the
    content of summary.json.
    """
    read, held_out, step = (outcome[n] for n in ("val_tokens", "held_out_tokens", "val_step"))
    tokens = f"{read:,}" if read == held_out else f"{read:,} of {held_out:,}"
    when = "" if step == outcome["steps"] else f", after step {step}"
    objective = run.objective
    unit = {"tokens": "nats per token", "reward": "per pair"}.get(
        objective.name, "per completion" if objective.loss_type == "kto" else "per pair"
    )
    of = "completions" if objective.name == "reward" else "tokens"
    return f"{outcome['val_loss']:.4f} {unit} on {tokens} held-out {of}{when}"


def _summary(run: RunConfig, outcome: dict, out: Path, report) -> Table:
    """Return the table that a run ends with: duration, goodput, validation losses, bits per byte
    (with those of gzip and xz), result of the verification (`report`, None without), files written,
    next command.
    """
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("done", f"{plural(outcome['steps'], 'step')} in {duration(outcome['seconds'])}")
    if outcome["goodput"]:
        table.add_row("goodput", goodput.describe(outcome["goodput"]))
    for name, share in outcome["slow_ranks"].items():
        table.add_row("", f"{name}: the others wait {share:.0%} of the wall time")
    if outcome["val_loss"] is not None:
        table.add_row(
            "validation loss",
            _validation(run, outcome),
        )
    for name, loss in outcome["val_sources"].items():
        per_byte, before = (outcome[f"val_sources_{of}"].get(name) for of in ("per_byte", "before"))
        table.add_row("", evaluate.describe_source(name, loss, per_byte, before))
    if outcome["bits_per_byte"] is not None:
        line = f"{outcome['bits_per_byte']:.3f}"
        held_out = outcome["validation_files"]
        if run.finish.compressors and held_out and not any(map(is_url, held_out)):
            gzip, xz = gzip_xz_bits([Path(f) for f in held_out])
            line += (
                f"   (gzip -9: {gzip:.3f}, xz -9: {xz:.3f}, each of the "
                f"{len(held_out)} held-out files separately)"
            )
        table.add_row("bits per byte", line)
    if report is not None:
        same = "transformers computes the same logits, loss, gradients and text from it"
        table.add_row(
            "transformers", same if report.ok else "THE EXPORTED DIRECTORY DIFFERS, see above"
        )
    if run.checkpoint.to is not None:
        table.add_row("uploaded", run.checkpoint.to)
    written = [name for name in (*folder.WRITTEN, *folder.OPTIONAL) if (out / name).exists()]
    table.add_row("written", f"{out}/ {{{', '.join(written)}}}")
    table.add_row("next", _next(run, out))
    return table


def _next(run: RunConfig, out: Path) -> str:
    """Return the dolmen command that most users need next: export if the run has no hf folder; else
    train grpo after a reward model, chat after training on chats, verify for encoders (which cannot
    generate), or generate.
    """
    name = mirror.run_name(out, run.checkpoint.to)
    model = shlex.quote(f"{name}/hf")
    if not (out / "hf").exists():
        return f"dolmen export {shlex.quote(name)} --to model/"
    if run.objective.name == "reward":
        return f"dolmen train grpo --reward {model} --init ... --data.path ..."
    if run.data.rows == "chats":
        return f"dolmen chat {model}"
    if run.spec.both_ways:
        return f"dolmen verify {model}"
    prompt = next(iter((run.finish.sample or "").strip().splitlines()), "Once upon a time")
    return f"dolmen generate {model} --prompt {shlex.quote(prompt)}"
