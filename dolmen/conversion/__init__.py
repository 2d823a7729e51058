"""Models in other programs' formats, read and written.

source.py         `open_source`: a model with its weights, whatever its format; `open_adapters`
checkpoint.py     a checkpoint of ours as a source
hf.py             a folder of transformers as a source
hf_export.py      writes a folder of transformers
meta.py           Meta's files of a Llama
sat.py            GLM-130B as SwissArmyTransformer saved it
megatron/         Megatron's ranks and torch_dist
sidecars.py       config.json, tokenizer and generation_config.json next to weights; sources whose
                  tensors are joined from several ranks
weights.py        the algebra of conversion rules; AdamW's state next to the weights of a source
peft.py, peft_config.py   adapters as PEFT writes them
convert.py        any source to any format that is written, and the comparison with the source
writing.py        threads that write and compare layers; the temporary folder of an output
config.py         options of `export` and `convert`
"""
