"""Optimizers.

config.py      options under `--optimizer`, and learning-rate schedules
optimizer.py   an optimizer per parameter role, fused AdamW, the fp16 loss scale
muon.py        Muon, and its Newton-Schulz iteration
"""
