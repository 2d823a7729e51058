"""What a run writes once, as it begins, so that it can be run again and its model be used."""

import tempfile
from pathlib import Path

import yaml

from dolmen.core.config import to_dict
from dolmen.data.batches import Loader
from dolmen.files import gate, write
from dolmen.training import folder
from dolmen.training.config import RunConfig


def write_config(out: Path, run: RunConfig) -> None:
    """config.yaml: the resolved run, which can be run again."""
    out.mkdir(parents=True, exist_ok=True)
    text = gate.whole_yaml(yaml.safe_dump(to_dict(run), sort_keys=False))
    write.replace(out / "config.yaml", text)


def write_tokenizer(out: Path, loader: Loader) -> None:
    """The tokenizer as transformers has it, in `tokenizer`: made elsewhere, as transformers writes
    through links.
    """
    with tempfile.TemporaryDirectory() as made:
        loader.tokenizer.save_pretrained(made)
        for file in sorted(path for path in Path(made).rglob("*") if path.is_file()):
            to = "tokenizer" / file.relative_to(made)
            write.replace(write.folder(out, to.parent) / file.name, gate.read_bytes(file, 2**32))
    folder.claim_files(out, "tokenizer")
