"""A training run: options, resolve, check, start, loop, finish.

Options and checks
    config.py         `RunConfig`: everything that decides what a run does
    request.py        a run and what happens to its folder and processes; YAML files
    spellings.py      other programs' names of our options
    resolve.py        opens models, tokenizer and data, each once
    checks/           rules across options
Processes
    worker.py         the process that starts a run, and each worker
    ray_train.py      a run as a job of Ray Train
    start.py          first start, restart, resume, agreed by all ranks
    initialize.py     the state at step 0
    attention_timing.py  the attention backend of a run on a GPU, by time
    self_test.py      whether this machine computes exact numerics
    replay.py         repeat a step, and compare its bits with the receipt
    receipt.py        receipts.jsonl: a chained hash of each step of exact numerics
    run.py            a run in one process, from start to end
    finish.py         export, comparison and sample at the end
Steps
    state.py          `TrainState`: all that training changes
    step.py           one update: forward, backward, reduce, clip, update
    loop.py           the training loop
    batches.py        batches: data or rollouts
    reference.py      log-probabilities of the reference model
    balance.py        expert load, and the bias that balances it
    modules.py        steps of modules that are not our decoder
Periodic work
    hooks.py          (every, hook): metrics, validation, checkpoints
    evaluate.py       validation, tasks and samples during training
    metrics.py        metrics.jsonl, history.jsonl, loss.png, experiment trackers
    goodput.py        shares of wall time: steps, restarts, saves, waiting for slow ranks
    report.py         the header and the progress line
    mfu.py            the peak that MFU is relative to
    profile.py, profile_table.py  the profile of a step
    folder.py         the files of a run, its lock, what may be deleted
    mirror.py         the copy of a run at a URL
"""
