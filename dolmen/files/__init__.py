"""Files from outside, read within bounds, and files of ours, written whole or not at all.

Reading
    gate.py                 the one gate: size, depth and UTF-8, then a schema
    schema.py, kinds.py     a language for what a file may hold; what each kind holds
    yaml_values.py          YAML from parser events, without recursion
    pickles.py              the restricted unpickler; a part of a file, as a file
    torch_files.py          files of torch.save, one tensor in memory
    safetensors.py          safetensors folders, streamed
    tokenizer_files.py      tokenizer files, checked before transformers reads them
    sentencepiece_model.py  tokenizer.model
    indexed.py              Megatron's .bin and .idx
Object storage
    storage.py              local copies of files at URLs (s3://), and uploads
    remote_file.py          text at URLs, read without a copy
Writing
    write.py                atomic writes, through no link
"""
