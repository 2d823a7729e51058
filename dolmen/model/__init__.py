"""One decoder (or encoder) for all families, computed from a tree of component specs.

What a model is
    spec/               frozen specs of components and parameters, without torch
    layout.py           `Layout`: how a model is split, checked against it
    training.py         dropout, router balance and adapters: what training adds
    count.py            parameters, FLOPs and activation bytes in closed form
What computes it
    build.py            from specs to a placed, allocated, initialised model
    decoder.py          embedding, blocks, final norm
    head.py             the LM head, and what turns hidden vectors into logits or losses
    block.py            a layer: attention and feed-forward around the residual stream
    attention.py        attention over this rank's heads, latent attention
    mlp.py              dense and sparse feed-forward layers
    positions.py        rope tables and ALiBi slopes
    layers.py           modules that own parameters
    component.py        interfaces: how modules are built, their inputs, the KV cache
    split.py            one rank's share: axes and stages
    routing_replay.py   routes of tokens to experts, recorded and replayed
"""
