"""The inference engine, and the commands that use it.

The engine
    engine.py             requests in, tokens out, one forward pass at a time
    request.py            requests, results and limits
    scheduler.py          continuous batching, chunked prefill, preemption
    block_table.py        which blocks of the cache a sequence has
    kv_cache.py           the paged KV cache
    model_runner.py       one forward pass, over a pipeline too
    sampler.py            the next tokens, on all ranks alike
    sampling.py           penalties, temperature, top-k, top-p, min-p
    sampling_params.py    their values
    adapters.py           several LoRA adapters over one base
Commands
    config.py             options of `generate` and `chat`
    generation_config.py  defaults of generation_config.json
    processes.py          a model on the processes of its layout
    generation.py         prompts to completions, stop strings
    detokenizer.py        tokens to text, piece by piece
    chat.py               a chat
    prompt_file.py, output_file.py  files of prompts and completions, and the journal
    offline.py            a file of prompts over replicas
    progress.py           its progress
    http/                 the HTTP server
"""
