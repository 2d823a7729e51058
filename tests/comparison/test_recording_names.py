"""Names of recorded tensors: layer, place in the order of a model, and operation."""

from dolmen.comparison.recording import gradient_tensor, inside, layer_of, operation, place


def test_a_name_has_a_layer_and_what_is_inside():
    names = {"layers.12.attn.q": (12, "attn.q"), "layers.3": (3, ""), "embed": (None, "embed")}
    assert {name: (layer_of(name), inside(name)) for name in names} == names


def test_names_are_sorted_by_layer_between_embedding_and_head():
    ordered = ["embed", "positions", "layers.0.mlp", "layers.2", "layers.10.attn"]
    places = [place(name) for name in ordered]
    assert places == [-1, -1, 0, 2, 10]
    last = ("final_norm", "logits", "project_out", "head.weight", "transform", "pooler", "follows")
    assert len({place(name) for name in last}) == 1 and place("final_norm") > 10**6


def test_an_operation_is_named_by_what_it_makes():
    names = {
        "layers.3.attn.q": "query projection",
        "layers.3.mlp": "down projection",
        "layers.3": "residual sum after the MLP",
        "layers.3.unknown": "a part of the layer",
        "embed": "embedding (and positions)",
        "logits": "head",
    }
    assert {name: operation(name) for name in names} == names


def test_a_gradient_follows_that_of_the_tensor_that_its_parameter_makes():
    tensors = {
        "layers.3.attn.q.weight": "layers.3.attn.q",
        "layers.3.attn.o.bias": "layers.3.attn",
        "layers.11.mlp.experts.gate.weight": "layers.11.mlp",
        "layers.3.attn_norm.weight": "layers.3.attn_norm",
        "final_norm.weight": "final_norm",
        "project_out.weight": "final_norm",
        "head.weight": "logits",
        "pooler.weight": "logits",
        "embed.weight": "embed",
        "positions.weight": "embed",
    }
    assert {name: gradient_tensor(name) for name in tensors} == tensors
