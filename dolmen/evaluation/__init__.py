"""How good a model is, and whether it equals transformers.

perplexity.py        perplexity and bits per byte of a text, log-likelihoods under any layout
validate.py          the mean loss over batches
tasks.py, harness.py tasks of lm_eval
model.py             loads the model; completions for tasks and samples
verify.py            `dolmen verify`: logits, loss, gradients and text, with tolerances
reference_model.py   a model in transformers, under our names
config.py            options of `verify` and `evaluate`
"""
