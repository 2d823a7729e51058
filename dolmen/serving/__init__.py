"""The inference engine, and the commands that use it.

The engine
    engine.py             requests in, tokens out, one forward pass at a time
    request.py            requests, sampling parameters, results and limits
    scheduler.py          continuous batching, chunked prefill, preemption
    block_table.py        which pages of the cache a sequence has
    kv_cache.py           the paged KV cache
    model_runner.py       one forward pass, over a pipeline too
    sampler.py            the next tokens, on all ranks alike
    sampling.py           penalties, temperature, top-k, top-p, min-p
    speculation.py        speculative decoding: prompt lookup, a draft model
    adapters.py           several LoRA adapters over one base
Commands
    config.py             options of `generate`, `chat` and `serve`
    processes.py          a model on the processes of its layout
    generation.py         prompts to tokens, tokens to text, stop strings, generation_config.json
    chat.py               a chat
    prompt_file.py, output_file.py  files of prompts and completions, and the journal
    offline.py            a file of prompts over replicas, and its progress
    http/                 the HTTP server
"""
