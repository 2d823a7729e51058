"""`dolmen diff`: the first tensor in which two programs of one model differ.

diff.py       runs both sides and compares them
ours.py       a side that dolmen computes, a training step
theirs.py     a side that transformers computes
hooks.py      hooks that record activations and gradients
recording.py  pieces of each tensor on the ranks
taps.py       names and order of the tensors
compare.py    tolerances, and the first tensor that differs
classify.py   what a difference looks like
report.py     the report
config.py     options of `diff`
"""
