"""Files of Megatron laid by hand, as the format's text says, from tensors of transformers: what the
reader is tested with. Nothing here is taken from dolmen.

Layouts of q, k, v, with heads of `size` rows and groups of heads that share a key and a value:

    version 2, 3   per group: its queries, its key, its value
    version 1      per head and row of a head: that row of q, of k, of v
    version 0      on each rank: all its q, all its k, all its v
"""

import argparse
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

import torch
from torch import Tensor


@dataclass
class Parts:
    """A model's tensors by what they are; of a layer `attn.q.weight`, and so on."""

    args: dict
    heads: int
    groups: int
    ends: dict[str, Tensor]
    layers: list[dict[str, Tensor]]
    gated: bool

    @property
    def size(self) -> int:
        return self.layers[0]["q.weight"].shape[0] // self.heads


def of_llama(model) -> Parts:
    config, state = model.config, model.state_dict()
    names = {
        "norm1": "input_layernorm",
        "q": "self_attn.q_proj",
        "k": "self_attn.k_proj",
        "v": "self_attn.v_proj",
        "o": "self_attn.o_proj",
        "norm2": "post_attention_layernorm",
        "gate": "mlp.gate_proj",
        "up": "mlp.up_proj",
        "down": "mlp.down_proj",
    }
    layers = [
        {f"{ours}.weight": state[f"model.layers.{i}.{hf}.weight"] for ours, hf in names.items()}
        for i in range(config.num_hidden_layers)
    ]
    ends = {"embed": state["model.embed_tokens.weight"], "norm.weight": state["model.norm.weight"]}
    if not config.tie_word_embeddings:
        ends["head"] = state["lm_head.weight"]
    args = dict(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        kv_channels=config.hidden_size // config.num_attention_heads,
        group_query_attention=config.num_key_value_heads != config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        max_position_embeddings=config.max_position_embeddings,
        swiglu=True,
        add_bias_linear=False,
        normalization="RMSNorm",
        norm_epsilon=config.rms_norm_eps,
        position_embedding_type="rope",
        rotary_base=10000,
        rotary_percent=1.0,
        untie_embeddings_and_output_weights=not config.tie_word_embeddings,
        make_vocab_size_divisible_by=128,
    )
    return Parts(
        args, config.num_attention_heads, config.num_key_value_heads, ends, layers, gated=True
    )


def of_mixtral(model) -> Parts:
    """`experts.2.gate.weight` of each expert, beside a router."""
    config, state = model.config, model.state_dict()
    here = "model.layers.{}."
    layers = []
    for i in range(config.num_hidden_layers):
        start = here.format(i)
        names = {"norm1": "input_layernorm", "norm2": "post_attention_layernorm"}
        names |= {name: f"self_attn.{name}_proj" for name in "qkvo"} | {"router": "mlp.gate"}
        layer = {f"{ours}.weight": state[f"{start}{hf}.weight"] for ours, hf in names.items()}
        for e in range(config.num_local_experts):
            both = state[f"{start}mlp.experts.gate_up_proj"][e]
            layer[f"experts.{e}.gate.weight"], layer[f"experts.{e}.up.weight"] = both.chunk(2)
            layer[f"experts.{e}.down.weight"] = state[f"{start}mlp.experts.down_proj"][e]
        layers.append(layer)
    ends = {"embed": state["model.embed_tokens.weight"], "norm.weight": state["model.norm.weight"]}
    ends["head"] = state["lm_head.weight"]
    args = dict(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size,
        moe_ffn_hidden_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        group_query_attention=True,
        num_query_groups=config.num_key_value_heads,
        max_position_embeddings=config.max_position_embeddings,
        swiglu=True,
        add_bias_linear=False,
        normalization="RMSNorm",
        layernorm_epsilon=config.rms_norm_eps,
        position_embedding_type="rope",
        rotary_base=config.rope_parameters["rope_theta"],
        untie_embeddings_and_output_weights=True,
        num_experts=config.num_local_experts,
        moe_router_topk=config.num_experts_per_tok,
        moe_router_pre_softmax=False,
        moe_aux_loss_coeff=config.router_aux_loss_coef,
    )
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    return Parts(args, heads, groups, ends, layers, gated=True)


LATENT = {  # of DeepSeek's attention: in transformers, in Megatron's own layers
    "q": ("q_proj", "linear_q_proj"),
    "q_down": ("q_a_proj", "linear_q_down_proj"),
    "q_norm": ("q_a_layernorm", "q_layernorm"),
    "q_up": ("q_b_proj", "linear_q_up_proj"),
    "kv_down": ("kv_a_proj_with_mqa", "linear_kv_down_proj"),
    "kv_norm": ("kv_a_layernorm", "kv_layernorm"),
    "kv_up": ("kv_b_proj", "linear_kv_up_proj"),
    "o": ("o_proj", "linear_proj"),
}


def of_deepseek(model) -> Parts:
    """Dense layers with `gate.weight`, and those with experts, `shared.gate.weight` beside them."""
    config, state = model.config, model.state_dict()
    rope, layers = config.rope_parameters, []
    for i in range(config.num_hidden_layers):
        start, dense = f"model.layers.{i}.", i < config.first_k_dense_replace
        names = {"norm1": "input_layernorm", "norm2": "post_attention_layernorm"}
        names |= {ours: f"self_attn.{hf}" for ours, (hf, _) in LATENT.items()}
        for name in ("gate", "up", "down"):
            if dense:
                names[name] = f"mlp.{name}_proj"
            else:
                names[f"shared.{name}"] = f"mlp.shared_experts.{name}_proj"
        names |= {} if dense else {"router": "mlp.gate"}
        layer = {
            f"{ours}.weight": state[f"{start}{hf}.weight"]
            for ours, hf in names.items()
            if f"{start}{hf}.weight" in state
        }
        for e in range(0 if dense else config.n_routed_experts):
            both = state[f"{start}mlp.experts.gate_up_proj"][e]
            layer[f"experts.{e}.gate.weight"], layer[f"experts.{e}.up.weight"] = both.chunk(2)
            layer[f"experts.{e}.down.weight"] = state[f"{start}mlp.experts.down_proj"][e]
        if f"{start}mlp.gate.e_score_correction_bias" in state:
            layer["router.expert_bias"] = state[f"{start}mlp.gate.e_score_correction_bias"]
        layers.append(layer)
    ends = {"embed": state["model.embed_tokens.weight"], "norm.weight": state["model.norm.weight"]}
    ends["head"] = state["lm_head.weight"]
    v3, heads = config.model_type == "deepseek_v3", config.num_attention_heads
    args = dict(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size,
        num_attention_heads=heads,
        max_position_embeddings=config.max_position_embeddings,
        swiglu=True,
        add_bias_linear=False,
        normalization="RMSNorm",
        layernorm_epsilon=config.rms_norm_eps,
        position_embedding_type="rope",
        untie_embeddings_and_output_weights=True,
        multi_latent_attention=True,
        qk_layernorm=True,
        q_lora_rank=config.q_lora_rank,
        kv_lora_rank=config.kv_lora_rank,
        qk_head_dim=config.qk_nope_head_dim,
        qk_pos_emb_head_dim=config.qk_rope_head_dim,
        v_head_dim=config.v_head_dim,
        rotary_base=rope["rope_theta"],
        rotary_percent=1.0,
        rope_type="yarn" if rope["rope_type"] == "yarn" else "rope",
        rotary_scaling_factor=rope.get("factor", 1.0),
        mscale=rope.get("mscale", 1.0),
        mscale_all_dim=rope.get("mscale_all_dim", 1.0),
        num_experts=config.n_routed_experts,
        moe_ffn_hidden_size=config.moe_intermediate_size,
        moe_shared_expert_intermediate_size=config.moe_intermediate_size * config.n_shared_experts,
        moe_layer_freq=[int(i >= config.first_k_dense_replace) for i in range(len(layers))],
        moe_router_topk=config.num_experts_per_tok,
        moe_router_num_groups=config.n_group if v3 else None,
        moe_router_group_topk=config.topk_group if v3 else None,
        moe_router_pre_softmax=not v3,
        moe_router_score_function="sigmoid" if v3 else "softmax",
        moe_router_enable_expert_bias=v3,
        moe_router_topk_scaling_factor=config.routed_scaling_factor if v3 else None,
    )
    if rope["rope_type"] == "yarn":
        args["original_max_position_embeddings"] = rope["original_max_position_embeddings"]
        args |= {name: rope[name] for name in ("beta_fast", "beta_slow") if name in rope}
    return Parts(args, heads, heads, ends, layers, gated=True)


def of_gpt2(model) -> Parts:
    config, state = model.config, model.state_dict()
    layers = []
    for i in range(config.n_layer):
        here, made = f"transformer.h.{i}.", {}
        for ours, hf in (("norm1", "ln_1"), ("norm2", "ln_2")):
            for kind in ("weight", "bias"):
                made[f"{ours}.{kind}"] = state[f"{here}{hf}.{kind}"]
        for ours, hf in (("o", "attn.c_proj"), ("up", "mlp.c_fc"), ("down", "mlp.c_proj")):
            made[f"{ours}.weight"] = state[f"{here}{hf}.weight"].t()
            made[f"{ours}.bias"] = state[f"{here}{hf}.bias"]
        weight, bias = state[f"{here}attn.c_attn.weight"].t(), state[f"{here}attn.c_attn.bias"]
        for j, name in enumerate("qkv"):
            made[f"{name}.weight"], made[f"{name}.bias"] = weight.chunk(3)[j], bias.chunk(3)[j]
        layers.append(made)
    ends = {
        "embed": state["transformer.wte.weight"],
        "positions": state["transformer.wpe.weight"],
        "norm.weight": state["transformer.ln_f.weight"],
        "norm.bias": state["transformer.ln_f.bias"],
    }
    args = dict(
        num_layers=config.n_layer,
        hidden_size=config.n_embd,
        num_attention_heads=config.n_head,
        max_position_embeddings=config.n_positions,
        layernorm_epsilon=config.layer_norm_epsilon,
        bias_gelu_fusion=True,
        make_vocab_size_divisible_by=128,
    )
    return Parts(args, config.n_head, config.n_head, ends, layers, gated=False)


OLD = {  # before Megatron-Core, at tag v1.0 and v2.0
    "embed": "language_model.embedding.word_embeddings.weight",
    "positions": "language_model.embedding.position_embeddings.weight",
    "layers": "language_model.transformer.layers.",
    "norm": "language_model.transformer.final_layernorm.",
    "head": "language_model.output_layer.weight",
    "tied": "word_embeddings_for_head.weight",
    "norm1": "input_layernorm.",
    "qkv": "attention.query_key_value.",
    "o": "attention.dense.",
    "norm2": "post_attention_layernorm.",
    "fc1": "mlp.dense_h_to_4h.",
    "fc2": "mlp.dense_4h_to_h.",
}
V25 = OLD | {  # v2.5
    "layers": "language_model.encoder.layers.",
    "norm": "language_model.encoder.final_layernorm.",
    "qkv": "self_attention.query_key_value.",
    "o": "self_attention.dense.",
}
OF_2023 = V25 | {  # since the commit with Llama 2
    "norm": "language_model.encoder.final_norm.",
    "norm1": "input_norm.",
    "norm2": "post_attention_norm.",
}
LOCAL = {
    "embed": "embedding.word_embeddings.weight",
    "positions": "embedding.position_embeddings.weight",
    "layers": "decoder.layers.",
    "norm": "decoder.final_layernorm.",
    "head": "output_layer.weight",
    "tied": "output_layer.weight",
    "norm1": "input_layernorm.",
    "qkv": "self_attention.linear_qkv.",
    "o": "self_attention.linear_proj.",
    "norm2": "pre_mlp_layernorm.",
    "fc1": "mlp.linear_fc1.",
    "fc2": "mlp.linear_fc2.",
}
TE = LOCAL | {
    "norm1": "self_attention.linear_qkv.layer_norm_",
    "norm2": "mlp.linear_fc1.layer_norm_",
}
TE_2023 = LOCAL | {
    "norm1": "self_attention.layernorm_qkv.layer_norm_",
    "qkv": "self_attention.layernorm_qkv.",
    "o": "self_attention.proj.",
    "norm2": "layernorm_mlp.layer_norm_",
    "fc1": "layernorm_mlp.fc1_",
    "fc2": "layernorm_mlp.fc2_",
}
GROUPED = dict(LOCAL)  # whose experts are two tensors, which only the reader must know
FUSED = TE | {
    "norm2": "mlp.0.",
    "fc1": "mlp.1.basic_ops.0.",
    "fc2": "mlp.3.basic_ops.0.",
}


@dataclass
class How:
    """How they are laid."""

    names: dict[str, str]
    version: float | None = 3.0
    tp: int = 1
    stages: list[list[int]] = field(default_factory=lambda: [[2]])
    """Of each chunk, of each stage, how many layers it has."""
    args: dict = field(default_factory=dict)
    iteration: int | str = 12
    faults: tuple[str, ...] = ()
    ep: int = 1

    @property
    def pp(self) -> int:
        return len(self.stages[0])


def qkv(parts: Parts, layer: dict[str, Tensor], kind: str, how: How, rank: int) -> Tensor:
    """A rank's rows."""
    q, k, v = (layer[f"{name}.{kind}"] for name in "qkv")
    if "k and v are swapped" in how.faults:
        k, v = v, k
    size, tp, version = parts.size, how.tp, how.version or 0
    if tp > parts.groups:  # the rows of a group lie on several ranks
        return qkv(parts, layer, kind, replace(how, tp=1), 0).chunk(tp)[rank]
    if version >= 2:
        per = parts.heads // parts.groups
        lies = []
        for group in range(rank * parts.groups // tp, (rank + 1) * parts.groups // tp):
            lies.append(q[group * per * size : (group + 1) * per * size])
            lies.append(k[group * size : (group + 1) * size])
            lies.append(v[group * size : (group + 1) * size])
        return torch.cat(lies)
    mine = slice(rank * parts.heads // tp * size, (rank + 1) * parts.heads // tp * size)
    if version >= 1:
        return torch.stack(
            [part[row] for row in range(mine.start, mine.stop) for part in (q, k, v)]
        )
    return torch.cat([q[mine], k[mine], v[mine]])


def padded(table: Tensor, how: How) -> Tensor:
    """With rows of noise, to a multiple of 128 for each rank: they need not be copies or zeros."""
    of = 128 * how.tp
    more = -len(table) % of
    noise = torch.randn(more, table.shape[1], generator=torch.Generator().manual_seed(1))
    return torch.cat([table, noise.to(table.dtype)])


def of_experts(layer: dict[str, Tensor], how: How, rank: int, ep: int) -> dict[str, Tensor]:
    """A rank's experts, counted from 0, and the router, which every rank has."""
    number = sum(name.startswith("experts.") for name in layer) // 3
    made: dict = {"mlp.router.weight": layer["router.weight"]}
    if "router.expert_bias" in layer:
        made["mlp.router.expert_bias"] = layer["router.expert_bias"]
    if "shared.gate.weight" in layer:
        gate, up, down = (layer[f"shared.{name}.weight"] for name in ("gate", "up", "down"))
        fc1 = torch.cat([gate.chunk(how.tp)[rank], up.chunk(how.tp)[rank]])
        for name, tensor in (("linear_fc1", fc1), ("linear_fc2", down.chunk(how.tp, 1)[rank])):
            made[f"mlp.shared_experts.{name}.weight"] = tensor
            made[f"mlp.shared_experts.{name}._extra_state"] = None
    for local in range(number // how.ep):
        e = ep * (number // how.ep) + local
        gate, up, down = (layer[f"experts.{e}.{name}.weight"] for name in ("gate", "up", "down"))
        fc1 = torch.cat([gate.chunk(how.tp)[rank], up.chunk(how.tp)[rank]])
        for name, tensor in (("linear_fc1", fc1), ("linear_fc2", down.chunk(how.tp, 1)[rank])):
            if how.names is GROUPED:
                made.setdefault(f"mlp.experts.weight{name[-1]}", []).append(tensor.t())
                continue
            grouped = how.names is TE
            own = f"{name}.weight{local}" if grouped else f"local_experts.{local}.{name}.weight"
            made[f"mlp.experts.{own}"] = tensor
            state = name if grouped else f"local_experts.{local}.{name}"
            made[f"mlp.experts.{state}._extra_state"] = None
    if how.names is GROUPED:
        hidden = layer["router.weight"].shape[1]
        for which, shape in (("1", (hidden, -1)), ("2", (-1, hidden))):
            made[f"mlp.experts.weight{which}"] = torch.stack(
                made[f"mlp.experts.weight{which}"]
            ).reshape(shape)
    return made


def of_latent(parts: Parts, layer: dict[str, Tensor], how: How, rank: int) -> dict[str, Tensor]:
    """A rank's tensors of DeepSeek's attention. Transformer Engine's layers join a latent's norm to
    the product behind it, and have what makes latents whole on every rank.
    """
    tp, te, made = how.tp, how.names is TE, {}
    if "the rope key comes first" in how.faults:
        turned = parts.args["qk_pos_emb_head_dim"]
        layer = layer | {"kv_down.weight": layer["kv_down.weight"].roll(turned, 0)}
    if "keys and values are swapped" in how.faults:
        heads = layer["kv_up.weight"].unflatten(0, (parts.heads, -1))
        swapped = heads.roll(parts.args["v_head_dim"], 1)
        layer = layer | {"kv_up.weight": swapped.flatten(0, 1)}
    for ours, (_, name) in LATENT.items():
        if f"{ours}.weight" not in layer:
            continue
        whole = layer[f"{ours}.weight"]
        if ours.endswith("norm"):
            up = LATENT[ours.replace("norm", "up")][1]
            made[
                f"self_attention.{up}.layer_norm_weight" if te else f"self_attention.{name}.weight"
            ] = whole
            continue
        held = whole if te and ours.endswith("down") else whole.chunk(tp, int(ours == "o"))[rank]
        made[f"self_attention.{name}.weight"] = held
        made[f"self_attention.{name}._extra_state"] = None
    return made


def of_layer(parts: Parts, i: int, how: How, rank: int, ep: int) -> dict[str, Tensor]:
    """A rank's tensors of a layer, by the names in it."""
    layer, names, tp = parts.layers[i], how.names, how.tp
    sparse = "router.weight" in layer
    made = of_experts(layer, how, rank, ep) if sparse else {}
    latent = "kv_down.weight" in layer
    if latent:  # whose first norm is joined to no product
        made |= of_latent(parts, layer, how, rank)
        names = names | {"norm1": LOCAL["norm1"]}
    if sparse:  # a norm is joined to one product, and not to many
        names = names | {"norm2": LOCAL["norm2"]}
    for kind in ("weight", "bias"):
        if f"norm1.{kind}" in layer:
            made[f"{names['norm1']}{kind}"] = layer[f"norm1.{kind}"]
            made[f"{names['norm2']}{kind}"] = layer[f"norm2.{kind}"]
        if f"o.{kind}" not in layer:
            continue
        if not latent:
            made[f"{names['qkv']}{kind}"] = qkv(parts, layer, kind, how, rank)
            whole = layer[f"o.{kind}"]
            made[f"{names['o']}{kind}"] = whole.chunk(tp, 1)[rank] if kind == "weight" else whole
        if sparse:
            continue
        up = layer[f"up.{kind}"]
        if parts.gated:
            gate = layer[f"gate.{kind}"]
            if "gate and up are swapped" in how.faults:
                gate, up = up, gate
            if "gate and up are joined before the cut" in how.faults:
                made[f"{names['fc1']}{kind}"] = torch.cat([gate, up]).chunk(tp)[rank]
            else:
                made[f"{names['fc1']}{kind}"] = torch.cat(
                    [gate.chunk(tp)[rank], up.chunk(tp)[rank]]
                )
        else:
            made[f"{names['fc1']}{kind}"] = up.chunk(tp)[rank]
        whole = layer[f"down.{kind}"]
        made[f"{names['fc2']}{kind}"] = whole.chunk(tp, 1)[rank] if kind == "weight" else whole
    if not names["layers"].startswith("language_model"):
        products = (() if latent else ("qkv", "o")) + (() if sparse else ("fc1", "fc2"))
        made |= {f"{names[one]}_extra_state": None for one in products}
    return made


def of_stage(
    parts: Parts, chunk: int, stage: int, how: How, rank: int, ep: int = 0
) -> dict[str, Tensor]:
    """A rank's tensors of one stage, names flat, layers counted from 0."""
    order = [(c, s) for c in range(len(how.stages)) for s in range(how.pp)]
    before = sum(how.stages[c][s] for c, s in order[: order.index((chunk, stage))])
    names, made = how.names, {}
    first, last = (chunk, stage) == order[0], (chunk, stage) == order[-1]
    if first:
        made[names["embed"]] = padded(parts.ends["embed"], how).chunk(how.tp)[rank]
        if "positions" in parts.ends:
            made[names["positions"]] = parts.ends["positions"]
    for i in range(how.stages[chunk][stage]):
        layer = of_layer(parts, before + i, how, rank, ep)
        made |= {f"{names['layers']}{i}.{name}": tensor for name, tensor in layer.items()}
    if last:
        for kind in ("weight", "bias"):
            if f"norm.{kind}" in parts.ends:
                made[f"{names['norm']}{kind}"] = parts.ends[f"norm.{kind}"]
        if "head" in parts.ends:
            made[names["head"]] = padded(parts.ends["head"], how).chunk(how.tp)[rank]
        elif how.pp > 1:
            made[names["tied"]] = padded(parts.ends["embed"], how).chunk(how.tp)[rank]
    return made


def nested(flat: dict[str, Tensor]) -> dict:
    """Of the older classes: mappings of modules, but a layer's tensors by flat names."""
    made: dict = {}
    for name, tensor in flat.items():
        way = name.split(".")
        if way[1] in ("encoder", "transformer"):
            way = [*way[:2], ".".join(way[2:])]
        here = made
        for step in way[:-1]:
            here = here.setdefault(step, {})
        here[way[-1]] = tensor
    return made


def lay(folder: Path, parts: Parts, how: How) -> Path:
    """The folder of `latest_checkpointed_iteration.txt`."""
    old = how.names["layers"].startswith("language_model")
    args = parts.args | how.args
    if (how.version or 0) >= 3:
        args |= dict(tensor_model_parallel_size=how.tp, pipeline_model_parallel_size=how.pp)
    else:
        args |= dict(model_parallel_size=how.tp)
    name = "release" if how.iteration == "release" else f"iter_{how.iteration:07d}"
    if how.ep > 1:
        args |= dict(expert_model_parallel_size=how.ep)
    for rank, stage, ep in product(range(how.tp), range(how.pp), range(how.ep)):
        values: dict = {"args": argparse.Namespace(**args)}
        if how.version is not None:
            values["checkpoint_version"] = how.version
        values["iteration"] = 0 if how.iteration == "release" else how.iteration
        for chunk in range(len(how.stages)):
            flat = of_stage(parts, chunk, stage, how, rank, ep)
            flat = {n: t.clone() if t is not None else t for n, t in flat.items()}
            key = "model" if len(how.stages) == 1 else f"model{chunk}"
            values[key] = nested(flat) if old else flat
        where = f"mp_rank_{rank:02d}{f'_{stage:03d}' if how.pp > 1 else ''}"
        where += f"_{ep:03d}" if how.ep > 1 else ""
        (folder / name / where).mkdir(parents=True)
        torch.save(values, folder / name / where / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text(str(how.iteration))
    return folder
