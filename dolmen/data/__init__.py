"""From sources to batches: text, chats, pairs, prompts and Megatron's data sets.

Sources and tokens
    sources.py            entries of `--data.path`: files, folders, hub ids
    readers.py            each kind of file, as documents, compressed or not
    quickstart_corpus.py  text that is on every machine
    tokenizer.py, bpe.py  tokenizers of transformers; a BPE trained on the data
    tokenise.py           documents to tokens, in threads
    corpus.py             tokenized corpora on disk, and their cache
    corpora.py            the corpus of a source, text or tokens
    indexed.py, indexed_export.py   Megatron's .bin and .idx, read and written
    scratch.py            cache folders that appear whole or not at all
The validation split
    heldout.py            which documents are held out, by their content
    division.py           training text and validation text of each source
    ending.py             where a long document's end is cut off
    in_order.py           text read once, for validation
Batches
    config.py             options under `--data`
    inputs.py             what can be refused before all text is read
    loader.py             from options to a loader
    batches.py, batch.py  a batch as a function of (seed, samples read)
    mixture.py            weighted mixtures of sources
    order.py, megatron.py the order of samples, ours and Megatron's
    cloze.py              masked tokens for encoders
Chats, pairs and prompts
    chats.py, template.py rows by their fields; chat templates and loss masks
    examples.py           chats as tokens on disk
    packing.py            examples packed into sequences
    chat_loader.py, pair_loader.py  batches of chats and of pairs
"""
