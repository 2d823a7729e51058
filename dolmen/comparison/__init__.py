"""`dolmen diff`: the first tensor that differs between two computations of a model.

diff.py               runs both sides, compares them and reports the first difference
dolmen_side.py        the side that dolmen computes: a training step, recorded by hooks
transformers_side.py  the side that transformers computes
recording.py          pieces of each tensor on the ranks; names and order of the tensors
compare.py            tolerances, and the first tensor that differs
classify.py           the likely cause of a difference
config.py             options of `diff`
"""
