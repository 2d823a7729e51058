"""Memory and time of generation, by hand: what a token reads, computes and sends."""

import pytest

from dolmen.core.topology import Topology
from dolmen.families.model import model_from_fields
from dolmen.planning.cost import Placement, collective_seconds
from dolmen.planning.hardware import read_cluster
from dolmen.planning.inference import _active_expert_share, cache_bytes, serving

LLAMA = dict(
    vocab_size=1024,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=4096,
    tie_word_embeddings=False,
)
# of one layer: q and o, k and v of half as many heads, three matrices of the MLP
LAYER = 2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 512
NODE = read_cluster("dgx-a100:1")


def spec(family: str = "llama", **more):
    return model_from_fields(family, LLAMA | more).spec


@pytest.mark.parametrize("tp, heads", ((1, 4), (2, 2), (4, 1), (8, 4)))
def test_a_cache_has_keys_and_values_of_a_ranks_heads(tp, heads):
    """All heads where tp does not divide them."""
    assert cache_bytes(spec(), tp, 100, 2) == 3 * 100 * heads * (32 + 32) * 2


def test_a_window_and_a_latent_bound_the_cache():
    windowed = spec("mistral", sliding_window=64, head_dim=32)
    assert cache_bytes(windowed, 1, 100, 4) == 3 * 64 * 4 * 64 * 4
    assert cache_bytes(windowed, 1, 50, 4) == 3 * 50 * 4 * 64 * 4


@pytest.mark.parametrize("tp, batch, dtype", ((1, 3, "bf16"), (4, 3, "bf16"), (2, 4000, "fp32")))
def test_a_token_reads_weights_and_cache_once_and_adds_over_tp(tp, batch, dtype):
    size, length, device = {"bf16": 2, "fp32": 4}[dtype], 512, NODE.device
    found = serving(spec(), NODE, tp, batch, length, dtype)
    norms = 7 * 256  # on every rank
    assert found.weights == size * ((3 * LAYER + 2 * 1024 * 256) // tp + norms)
    text = cache_bytes(spec(), tp, length, size)
    assert found.cache == batch * text and found.other == device.reserved
    assert found.most_texts == (device.memory - device.reserved - found.weights) // text
    assert found.fits == (found.held <= device.memory)
    read = (found.weights + found.cache) / (device.bandwidth * device.streaming)
    # a multiply and an add, of each weight but the embedding, and of scores and their use
    products = 3 * LAYER + 1024 * 256 + 3 * 2 * 256 * (length + 1) / 2
    computed = 2 * batch * products / tp / (device.rate(dtype) * device.product)
    road = Placement(NODE, Topology(tp=tp), tp).road(range(tp))
    sums = 2 * 3 * collective_seconds("all-reduce", batch * 256 * size, road)
    assert found.seconds == pytest.approx(max(read, computed) + sums)
    assert found.tokens_per_second == pytest.approx(batch / found.seconds / tp)
    parts = {"memory": read, "compute": computed, "tp": sums}
    assert found.bound == max(parts, key=lambda name: parts[name])


def test_of_experts_a_batch_reads_those_that_it_chooses():
    mixtral = spec("mixtral", num_local_experts=8, num_experts_per_tok=2, head_dim=32)
    assert _active_expert_share(spec(), 5) == 1
    assert _active_expert_share(mixtral, 1) == pytest.approx(2 / 8)
    assert _active_expert_share(mixtral, 3) == pytest.approx(1 - (6 / 8) ** 3)
    few, many = (serving(mixtral, NODE, 1, batch, 64, "bf16") for batch in (1, 2))
    assert few.weights == many.weights
    experts = 3 * 8 * 3 * 256 * 512 * 2
    more = experts * ((1 - (6 / 8) ** 2) - 2 / 8) + few.cache
    rate = NODE.device.bandwidth * NODE.device.streaming
    assert many.seconds - few.seconds == pytest.approx(more / rate, rel=1e-3)


def test_what_does_not_fit_has_room_for_no_sequence():
    large = spec(hidden_size=16384, intermediate_size=65536, num_hidden_layers=9)
    found = serving(large, NODE, 1, 1, 4096, "fp32")
    assert not found.fits and found.most_texts == 0 and found.held > NODE.device.memory
