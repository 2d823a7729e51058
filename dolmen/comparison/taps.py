"""Names and order of the tensors that are compared, and the operation that computes each.

Names are those of our modules, as our parameters have them: `layers.3.attn.q` is what the product
with `layers.3.attn.q.weight` makes. What has no module has a word of its own:

    embed                    what enters the first layer
    layers.N                 the residual stream behind a layer
      .attn_norm             of its parts
      .attn.q .k .v          products, with their biases
      .attn.q_norm .k_norm
      .attn.query .key .value    as they attend: turned by rope
      .attn.scores           softmax(scale q k^T + mask), computed from these by the definition
      .attn.sums             what the scores weigh, before the output projection
      .attn                  with it
      .middle                the residual stream between mixer and mlp
      .mlp_norm
      .mlp.router .mlp.gate .mlp.up
      .mlp.act               act(gate) * up, or act(up)
      .mlp
    final_norm, logits
"""

import re

# Behind layers.N -> the operation that makes it.
INSIDE = {
    "norm": "norm before mixer and mlp",
    "attn_norm": "norm before attention",
    "attn.q_a_norm": "norm of the queries' latent",
    "attn.kv_a_norm": "norm of the keys' latent",
    "attn.q": "query projection",
    "attn.k": "key projection",
    "attn.v": "value projection",
    "attn.q_norm": "norm of queries",
    "attn.k_norm": "norm of keys",
    "attn.query": "rope of queries (positions)",
    "attn.key": "rope of keys (positions)",
    "attn.value": "values as they are attended to",
    "attn.scores": "scores: scale, mask, window, softmax",
    "attn.sums": "attention: sums of values by scores",
    "attn": "output projection",
    "attn_post_norm": "norm behind attention",
    "middle": "residual sum behind attention",
    "mlp_norm": "norm before the mlp",
    "mlp.router": "router",
    "mlp.shared.gate": "gate projection of shared experts",
    "mlp.shared.up": "up projection of shared experts",
    "mlp.shared.act": "activation of shared experts",
    "mlp.gate": "gate projection",
    "mlp.up": "up projection",
    "mlp.act": "activation: act(gate) * up",
    "mlp": "down projection",
    "mlp_post_norm": "norm behind the mlp",
    "": "residual sum behind the mlp",
}
OUTSIDE = {
    "embed": "embedding (and positions)",
    "final_norm": "final norm",
    "logits": "head",
}
LAYER = re.compile(r"layers\.(\d+)\.?(.*)")

# Behind layers.N: a parameter's module -> the tensor whose gradient, once known, gives its own.
MADE_WITH = {
    "attn.o": "attn",
    "mlp.down": "mlp",
    "mlp.experts.down": "mlp",
    "mlp.shared.down": "mlp",
    "attn.sinks": "attn.sums",
    "mlp.experts.gate": "mlp",
    "mlp.experts.up": "mlp",
}
OF_HEAD = ("head", "transform", "pooler", "follows")
END, LAST_ONES = 1 << 30, ("final_norm", "logits", "project_out", *OF_HEAD)


def layer_of(name: str) -> int | None:
    """The number of the layer that a tensor is of; None outside."""
    found = LAYER.fullmatch(name)
    return None if found is None else int(found[1])


def inside(name: str) -> str:
    """The name without its layer."""
    found = LAYER.fullmatch(name)
    return name if found is None else found[2]


def place(name: str) -> int:
    """The layer of a tensor or parameter, where they are sorted by layers: what is in front of all
    of them is in layer -1.
    """
    number = layer_of(name)
    return number if number is not None else END if name.startswith(LAST_ONES) else -1


def operation(name: str) -> str:
    """Name the operation that computes a tensor of forward."""
    return {**OUTSIDE, **INSIDE}.get(inside(name), "a part of the layer")


def gradient_tensor(parameter: str) -> str:
    """The tensor whose gradient, once known, gives that of a parameter."""
    module, _, _ = parameter.rpartition(".")
    number, word = layer_of(module), inside(module)
    if number is None:
        made = {"final_norm": "final_norm", "project_out": "final_norm"}
        return "logits" if word.startswith(OF_HEAD) else made.get(word, "embed")
    return f"layers.{number}.{MADE_WITH.get(word, word)}"


def downstream(word: str) -> tuple[str, ...]:
    """Names of the tensors that everything in a tensor inside a layer passes through."""
    if word in ("mlp.gate", "mlp.up"):
        return ("mlp.act",)
    if word in ("attn", "attn.sums", "attn_post_norm"):
        return ("middle",)
    return ("attn.sums", "middle") if word.startswith("attn.") else ()
