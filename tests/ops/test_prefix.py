"""A prefix, whose tokens see one another, beside the functions of transformers that take any mask;
and a model with one: what its tokens feel, in training, and read with a cache.
"""

import pytest
import torch
from tiny_models import Flat, Tiny, build, initialize, with_mixer_fields, with_num_layers
from torch._dynamo.testing import CompileCounterWithBackend
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from dolmen.core.mesh import SINGLE
from dolmen.model.decoder import Decoder
from dolmen.model.head import compute_logits, cross_entropy_function
from dolmen.model.spec import AlibiSpec, RopeSpec, positions
from dolmen.ops.attention import Attend, Documents, blockwise
from dolmen.ops.kernels import H100
from dolmen.ops.rope import PositionIds, prefix_positions
from dolmen.serving import engine
from dolmen.serving.kv_cache import KVCache

HERE, VOCABULARY, LENGTH = torch.device("cpu"), 71, 24
CONFIG = with_mixer_fields(
    Flat(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        initializer_range=0.3,
    ),
    mask="prefix",
)


def decoder(config: Tiny = CONFIG) -> Decoder:
    model = build(config, SINGLE)
    initialize(model, 0)
    return model.eval()


def text(rows: int = 1, length: int = LENGTH) -> torch.Tensor:
    g = torch.Generator().manual_seed(0)
    return torch.randint(VOCABULARY, (rows, length), generator=g)


# as ChatGLM-6B: half of each head turns by where in the prefix a token is, half by how far behind
GLM = with_mixer_fields(CONFIG, positions=RopeSpec(8, 100.0, streams=2))


def placed(config: Tiny, documents: Documents) -> PositionIds | None:
    if config.spec.streams == 1:
        return None
    index = torch.arange(documents.starts.shape[1]).expand_as(documents.starts)
    return PositionIds.from_ids(prefix_positions(index, documents.reach).transpose(0, 1))


def prefix(*lengths: int, length: int = LENGTH) -> Documents:
    """Of a sequence each."""
    starts = torch.zeros((len(lengths), length), dtype=torch.int64)
    return Documents.from_starts(starts, starts + torch.tensor(lengths)[:, None])


def test_sdpa_of_transformers():
    """By a mask of [batch, 1, queries, keys], written out token by token."""
    length, lengths = 150, (100, 0, 150)
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, length, h, 16, generator=g, dtype=torch.float64) for h in (4, 2, 2))
    seen = torch.zeros(3, 1, length, length, dtype=torch.bool)
    for row, n in enumerate(lengths):
        for i in range(length):
            seen[row, 0, i, : max(i + 1, n)] = True
    module = torch.nn.Module()
    module.num_key_value_groups = 2
    module.is_causal = False

    def theirs(q, k, v):
        turned = (t.transpose(1, 2) for t in (q, k, v))
        return sdpa_attention_forward(module, *turned, seen)[0]

    def ours(q, k, v):
        attend = Attend(mask="prefix").with_documents(prefix(*lengths, length=length))
        return blockwise.attention(q, k, v, attend)

    weight = torch.linspace(-1, 1, q.numel(), dtype=torch.float64).view(q.shape)
    found = []
    for road in (ours, theirs):
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        out = road(*leaves)
        found.append([out.detach(), *torch.autograd.grad((out * weight).sum(), leaves)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("window", [None, 3])
@torch.no_grad()
def test_what_a_token_feels(window):
    """Of one layer: another token at 5 is felt by all of its prefix, before and behind, and by who
    sees back to it; one behind the prefix by itself and later ones alone.
    """
    model = decoder(with_num_layers(with_mixer_fields(CONFIG, window=window), 1))
    tokens, documents = text(), prefix(8)

    def felt(at: int) -> list[bool]:
        other = tokens.clone()
        other[0, at] = (other[0, at] + 1) % VOCABULARY
        same = model(tokens, compute_logits, documents=documents) == model(
            other, compute_logits, documents=documents
        )
        return (~same.all(-1))[0].tolist()

    most = LENGTH if window is None else window
    assert felt(5) == [i < 5 or i - 5 < most for i in range(LENGTH)]
    assert felt(9) == [0 <= i - 9 < most for i in range(LENGTH)]


@torch.no_grad()
def test_no_prefix_is_causal():
    """To the bit: given none, one of no token, or one of a token."""
    model = decoder()
    causal = decoder(with_mixer_fields(CONFIG, mask="causal"))(text(), compute_logits)
    for documents in (None, prefix(0), prefix(1)):
        torch.testing.assert_close(
            model(text(), compute_logits, documents=documents), causal, rtol=0, atol=1e-5
        )


@pytest.mark.parametrize("config", [CONFIG, GLM], ids=["one stream", "two streams"])
@torch.no_grad()
def test_a_cache_equals_the_whole_text(config):
    """Prompts of unlike lengths are prefixes, read at once; what follows sees back alone."""
    model, tokens, lengths = decoder(config), text(3), (9, 9, 4)
    documents = prefix(*lengths)
    want = model(tokens, compute_logits, documents=documents, positions=placed(config, documents))
    cache, found = KVCache(model.spec, 4), {i: [] for i in range(3)}
    done = dict.fromkeys(found, 0)
    spans = {i: positions.prefix_span(n, model.spec.streams) for i, n in enumerate(lengths)}
    for new in ({0: 9, 1: 12, 2: 4}, {0: 1, 1: 1, 2: 5}, {0: 14, 1: 11, 2: 15}):
        reading = cache.append(new, HERE, spans=spans)
        parts = [tokens[i, done[i] : done[i] + new[i]] for i in reading.sequences]
        read = model(torch.cat(parts)[None], compute_logits, cache=reading)[0]
        for i, part in zip(
            reading.sequences, read.split([new[i] for i in reading.sequences]), strict=True
        ):
            found[i].append(part)
            done[i] += new[i]
    got = torch.stack([torch.cat(found[i]) for i in range(3)])
    assert want.abs().max() > 1 and (got - want).abs().max() < 1e-5
    none = prefix(0, 0, 0)
    other = model(tokens, compute_logits, documents=none, positions=placed(config, none))
    assert (other - want).abs().max() > 1e-2  # and it matters


def test_a_prefix_in_parts_is_refused():
    cache = KVCache(CONFIG.spec, 4)
    with pytest.raises(
        ValueError, match="sequence 0 has read 0 tokens and reads 4, but its first 12"
    ):
        cache.append({0: 4}, HERE, spans={0: positions.prefix_span(12, 1)})
    cache.append({0: 9}, HERE)
    with pytest.raises(ValueError, match="has read 9 tokens and reads 13"):
        cache.append({0: 13}, HERE, spans={0: positions.prefix_span(12, 1)})


@pytest.mark.parametrize("config", [CONFIG, GLM], ids=["one stream", "two streams"])
@torch.no_grad()
def test_a_prompt_is_the_prefix(monkeypatch, config):
    """Greedy text, of prompts longer than what a forward reads; each token that of a forward of
    everything so far.
    """
    monkeypatch.setattr(engine, "TOKENS_AT_ONCE", 8)
    model, prompts = decoder(config), [text()[0, :n].tolist() for n in (13, 1, 6, 13)]
    for prompt, new in zip(prompts, engine.generate(model, prompts, 5), strict=True):
        so_far = list(prompt)
        for token in new:
            documents = prefix(len(prompt), length=len(so_far))
            positions = placed(config, documents)
            last = model(
                torch.tensor([so_far]), compute_logits, documents=documents, positions=positions
            )
            assert int(last[0, -1].argmax()) == token
            so_far.append(token)
        assert len(new) == 5


def test_one_program_serves_all_prefixes(monkeypatch):
    """Without a graph break, forward and backward."""
    torch.compiler.reset()  # what other tests compiled
    model, counter = decoder(), CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(blockwise, "_compile", lambda passes: passes)
    for block in model.layers.values():
        block.compile(backend=counter, fullgraph=True)
    for lengths in ((5, 0), (1, 24), (13, 7)):
        tokens, documents = text(2), prefix(*lengths)
        compiled = model(tokens, cross_entropy_function(tokens), documents=documents)
        compiled.backward()
        with torch.compiler.set_stance("force_eager"):
            eager = model(tokens, cross_entropy_function(tokens), documents=documents)
        assert abs(float(compiled.detach()) / float(eager.detach()) - 1) < 1e-6
    assert counter.frame_count == 1


def test_flash_has_no_prefix_mask():
    """What is chosen is said; and a model without a prefix mask is given none."""
    model = build(CONFIG, SINGLE, dtype=torch.bfloat16, hardware=H100)
    assert "attention by blocks (flash has no prefix mask)" in model.split.kernels.describe(False)
    causal = with_mixer_fields(CONFIG, mask="causal")
    kernels = build(causal, SINGLE, dtype=torch.bfloat16, hardware=H100).split.kernels
    assert kernels.attention_reason == ""
    with pytest.raises(ValueError, match="the model has no prefix mask"):
        decoder(causal)(text(), compute_logits, documents=prefix(5))
    with pytest.raises(ValueError, match="ALiBi with a prefix mask"):
        with_mixer_fields(CONFIG, positions=AlibiSpec())
