"""Models in other programs' formats, read and written.

source.py         `open_source`: a model with its weights, whatever its format
checkpoint.py     a checkpoint of ours as a source
hf.py             a folder of transformers as a source
hf_export.py      writes a folder of transformers
meta.py           Meta's files of a Llama
sat.py            GLM-130B as SwissArmyTransformer saved it
megatron/         Megatron's ranks and torch_dist
joined.py         sources whose tensors are joined from several ranks
sidecars.py       config.json, tokenizer and generation_config.json next to weights
weights.py        weight rules applied to tensors
moments.py        AdamW's state next to the weights of a source
peft.py, peft_config.py   adapters as PEFT writes them
adapters.py       adapters to be used over a base, for multi-LoRA
convert.py        any source to any format that is written
proof.py          compares what was written with the source
layer_pool.py     threads that write and compare layers
unfinished.py     the temporary folder of an output
config.py         options of `export` and `convert`
"""
