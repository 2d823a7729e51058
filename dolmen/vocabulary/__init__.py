"""New tokens for a trained model (`dolmen vocab`).

train.py           learns a vocabulary from text
merge.py           appends the tokens of one tokenizer to another
chain.py           the BPE merges that lead to a token
extend.py          rows of embedding and head for new tokens
check.py           checks that a tokenizer loses no text
report.py          characters and bytes per token
folder.py          the files of a tokenizer
tokenizer_json.py  a sentencepiece model as tokenizer.json
config.py          options of `vocab`
"""
