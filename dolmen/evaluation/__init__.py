"""How good a model is, and whether it equals transformers.

perplexity.py        loss, perplexity and bits per byte of a text
rows.py              log-likelihoods of rows of tokens under any layout
validate.py          the mean loss over batches
tasks.py, harness.py tasks of lm_eval
texts.py             completions for tasks and samples
verify.py            `dolmen verify`: logits, loss, gradients and text
compare.py           differences and their tolerances
theirs.py            a model in transformers, under our names
config.py            options of `verify` and `evaluate`
"""
