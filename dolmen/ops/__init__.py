"""Mathematics on local tensors, without torch.distributed.

kernels.py       which kernels a model computes with, chosen once at build
attention_support.py  what each attention backend computes, as a table
attention/       attention: its interface, our blocks, FlashAttention and cuDNN, decoding
rope.py          position ids and rotary embeddings
norm.py          RMSNorm with its backward
elementwise.py   activations, dropout by hashes, accumulation in a wider dtype
loss.py          pieces of the vocabulary-parallel cross-entropy
moe.py           mixture of experts: routing, grouped products, balance losses
fp8.py           8-bit payloads and scales
int8.py          frozen weights in 8 bits
invariant.py     operators whose bits do not depend on what else is computed with them
numerics.py      how a run rounds to 8 bits and adds exactly, as data
"""
