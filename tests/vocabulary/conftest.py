"""Vocabularies of English and of Chinese, of each kind, learned once."""

import pytest
from texts import CHINESE, ENGLISH

from dolmen.vocabulary.config import VocabText, VocabTrainConfig
from dolmen.vocabulary.train import train

SIZES = {"en": 450, "zh": 800, "zh-unigram": 600}  # the text gives 602 pieces of unigram
TEXTS = {"en": ENGLISH, "zh": CHINESE}


@pytest.fixture(scope="session")
def corpora(tmp_path_factory):
    """Folder with en.txt and zh.txt."""
    folder = tmp_path_factory.mktemp("corpora")
    for name, text in TEXTS.items():
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def vocabularies(corpora, tmp_path_factory):
    """(language, kind) -> folder; made when first asked for."""
    folder, made = tmp_path_factory.mktemp("vocabularies"), {}

    def get(language, kind):
        if (language, kind) not in made:
            to = folder / f"{language}-{kind}"
            text = VocabText((str(corpora / f"{language}.txt"),))
            size = SIZES.get(f"{language}-{kind}", SIZES[language])
            train(VocabTrainConfig(size, kind, str(to), text), progress=False)
            made[language, kind] = to
        return made[language, kind]

    return get
