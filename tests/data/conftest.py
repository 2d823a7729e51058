"""A small byte-level tokenizer for all tests of the data, and a corpus of numbered documents."""

from pathlib import Path

import numpy as np
import pytest
from loading import prepare_loader

from dolmen.data.config import DataConfig
from dolmen.data.tokenizer import load_tokenizer, train_bpe
from dolmen.files import indexed


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    train_bpe([Path(__file__).read_text()], 300, folder, progress=False)
    return str(folder)


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder):
    return load_tokenizer(tokenizer_folder)


@pytest.fixture
def documents(tmp_path):
    """A folder of 40 different .txt files of 20 to 59 lines."""
    folder = tmp_path / "documents"
    folder.mkdir()
    for number in range(40):
        text = "".join(f"line {line} of document {number}\n" for line in range(20 + number))
        (folder / f"{number:02}.txt").write_text(text)
    return folder


@pytest.fixture
def load(tmp_path, tokenizer_folder):
    """prepare(), short: load(path, ..., option=value) with a cache of the test's own."""

    def load(
        *path,
        sequence_length=16,
        global_batch_size=4,
        seed=0,
        vocab_size=300,
        verify=True,
        steps=None,
        **options,
    ):
        config = DataConfig(
            tuple(map(str, path)), **{"cache": str(tmp_path / "cache"), "workers": 2, **options}
        )
        return prepare_loader(
            config,
            tokenizer_folder,
            vocab_size,
            sequence_length,
            global_batch_size,
            seed,
            progress=False,
            verify=verify,
            steps=steps,
        )

    return load


@pytest.fixture
def data_set(tmp_path):
    """data_set(name, documents of sequences of tokens) -> the .bin, of uint16 unless `dtype`."""

    def data_set(name, documents, dtype="<u2", modes=None):
        sequences = [np.array(one) for document in documents for one in document]
        lengths = np.array([len(one) for one in sequences])
        firsts = np.cumsum([0] + [len(document) for document in documents])
        file = tmp_path / name
        indexed.save(file, sequences, np.dtype(dtype), lengths, firsts, modes)
        return file

    return data_set
