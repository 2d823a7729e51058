"""The processor chain against that of transformers, on random scores and random texts; and what
transformers has not, against its definition.
"""

import math
from types import SimpleNamespace

import pytest
import torch
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList
from transformers.generation import logits_process as theirs

from dolmen.serving.request import SamplingParams
from dolmen.serving.sampling import process

ROWS, VOCABULARY = 40, 53
CHANCE = torch.Generator().manual_seed(0)
SCORES = 4 * torch.randn(ROWS, VOCABULARY, generator=CHANCE)
TEXTS = torch.randint(VOCABULARY, (ROWS, 12), generator=CHANCE)
ENDS, PROMPT = (3, 17), 5


def chain(options: SamplingParams) -> LogitsProcessorList:
    """As `GenerationMixin._get_logits_processor` puts them together."""
    out = LogitsProcessorList()
    if options.logit_bias:
        bias = [[[token], value] for token, value in options.logit_bias.items()]
        out.append(theirs.SequenceBiasLogitsProcessor(bias))
    if options.repetition_penalty != 1:
        out.append(theirs.RepetitionPenaltyLogitsProcessor(options.repetition_penalty))
    if options.min_new_tokens:
        processor = theirs.MinNewTokensLengthLogitsProcessor(
            PROMPT, options.min_new_tokens, list(ENDS)
        )
        out.append(processor)
    if options.temperature != 1:
        out.append(theirs.TemperatureLogitsWarper(options.temperature))
    if options.top_k:
        out.append(theirs.TopKLogitsWarper(options.top_k))
    if options.top_p is not None and options.top_p < 1:
        out.append(theirs.TopPLogitsWarper(options.top_p))
    if options.min_p is not None:
        out.append(theirs.MinPLogitsWarper(options.min_p))
    return out


@pytest.mark.parametrize(
    "options",
    [
        SamplingParams(),
        SamplingParams(temperature=0.3),
        SamplingParams(top_k=1),
        SamplingParams(top_k=7),
        SamplingParams(top_k=1000),
        SamplingParams(top_p=0.6),
        SamplingParams(top_p=1e-6),
        SamplingParams(top_p=1.0),
        SamplingParams(min_p=0.1),
        SamplingParams(min_p=1.0),
        SamplingParams(repetition_penalty=1.7),
        SamplingParams(repetition_penalty=0.6),
        SamplingParams(logit_bias={3: 5.0, 20: -math.inf, 52: -1.5}),
        SamplingParams(min_new_tokens=8, stop=ENDS),
        SamplingParams(min_new_tokens=7, stop=ENDS),
        SamplingParams(0.7, 20, 0.9, 0.05, 1.3),
        SamplingParams(
            1.6, 30, 0.8, 0.02, 1.1, logit_bias={4: 2.0, 9: -2.0}, min_new_tokens=9, stop=ENDS
        ),
    ],
    ids=str,
)
def test_transformers_chain(options):
    before = SCORES.clone()
    got = process(SCORES, TEXTS.tolist(), options, [PROMPT] * ROWS)
    want = chain(options)(TEXTS, SCORES.clone())
    assert torch.equal(SCORES, before) and got.dtype == torch.float32
    assert torch.equal(got.isneginf(), want.isneginf())
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def test_the_order_is_that_of_transformers():
    """The list that transformers itself makes has the order of `chain`."""
    config = GenerationConfig(
        do_sample=True,
        temperature=0.7,
        top_k=5,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.3,
        min_new_tokens=2,
        eos_token_id=3,
        sequence_bias=[[[4], 1.0]],
    )
    config._eos_token_tensor = torch.tensor([3])
    options = SamplingParams(0.7, 5, 0.9, 0.1, 1.3, logit_bias={4: 1.0}, min_new_tokens=2)

    class Bare(GenerationMixin):
        config = SimpleNamespace(is_encoder_decoder=False)

    made = Bare()._get_logits_processor(config, input_ids_seq_length=PROMPT)
    assert [type(one) for one in made] == [type(one) for one in chain(options)]


def test_texts_of_any_lengths():
    """Each row's penalty is of its own tokens."""
    texts = [row[:n] for n, row in enumerate(TEXTS[:12].tolist())]
    options = SamplingParams(0.7, 20, 0.9, 0.05, 1.3)
    got = process(SCORES[:12], texts, options)
    for i, text in enumerate(texts):
        want = chain(options)(torch.tensor([text], dtype=torch.int64), SCORES[i : i + 1].clone())
        torch.testing.assert_close(got[i : i + 1], want, rtol=1e-6, atol=1e-6)


def test_presence_and_frequency_count_what_is_new():
    """logit - presence * (it has come) - frequency * (how often), of the output alone."""
    text = [1, 1, 2, 7, 7, 7, 2]
    options = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    got = process(SCORES[:1], [text], options, [3])
    want = SCORES[:1].clone()
    want[0, 7] -= 0.5 + 3 * 0.25
    want[0, 2] -= 0.5 + 0.25
    torch.testing.assert_close(got, want)


def test_greedy_is_penalised_and_not_cut():
    options = SamplingParams(0.0, repetition_penalty=2.0)
    got = process(SCORES, TEXTS.tolist(), options)
    torch.testing.assert_close(
        got, chain(SamplingParams(repetition_penalty=2.0))(TEXTS, SCORES.clone())
    )
