"""Sources to batches: text, chats, pairs, prompts and Megatron's data sets.

Sources and tokens
    sources.py            entries of `--data.path`: files, folders, hub ids
    readers.py            each kind of file, as documents, compressed or not
    tokenizer.py, bpe.py  tokenizers of transformers; a BPE trained on the data
    tokenise.py           documents to tokens, in threads
    token_cache.py        folders of the cache, under a hash of what decides them
    corpus.py             tokenized corpora on disk
    indexed.py, indexed_export.py   Megatron's .bin and .idx, read and written
    validation_split.py   held-out documents, and training text of each source
Batches
    config.py             options under `--data`
    inputs.py             checks and opens what the options name
    loader.py             from options to a loader; batches of text
    base_loader.py, batch.py  a batch as a function of (seed, samples read)
    mixture.py            weighted mixtures of sources
    order.py              the order of samples, ours and Megatron's
    masked_lm.py          masked tokens for encoders
Chats, pairs and prompts
    template.py           chat templates and loss masks
    examples.py           rows of chats by their fields, as tokens on disk
    packing.py            examples packed into sequences
    chat_loader.py        batches of chats, pairs and completions
"""
