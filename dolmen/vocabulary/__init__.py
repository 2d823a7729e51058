"""New tokens for a trained model (`dolmen vocab`).

train.py             learns a vocabulary from text
merge.py             appends the tokens of one tokenizer to another
extend.py            rows of embedding and head for new tokens
check.py             checks that a tokenizer loses no text; characters and bytes per token
tokenizer_folder.py  the files of a tokenizer
config.py            options of `vocab`
"""
