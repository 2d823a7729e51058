"""Predicted memory, traffic and time of a step (`dolmen plan`, `dryrun`, `schedule`).

Dry run: the real step without values
    dryrun.py        any rank of any world
    counting.py      operators, FLOPs and collectives
    steady_state.py  few microbatches for many
    ledger.py        the operations of a rank in order, and bytes held by kind
    dry_report.py    tables of it
Closed forms
    space.py         all layouts of a model on so many GPUs
    ranks.py         layers and parameters of each rank
    capacity.py      memory of each rank
    operations.py    operations of one rank
    blocks.py        of a block, embedding, head and update
Time
    hardware.py      devices and clusters, from YAML
    cost.py          links that a group of ranks crosses; seconds of an operation
    step.py          seconds of a step
    pricing.py       seconds of layouts, at two depths
    measure.py       this machine as a cluster
Search and results
    question.py      what is planned
    search.py        the fastest layouts and their neighbours
    winner.py        the first ones, dry-run
    plan.py          the result, as data
    answer.py, report.py  as text; as a page and other files
    inference.py     weights and KV cache of generation
    config.py        options of `plan` and `dryrun`
    figures.py       drawings of the page
    draw.py          a pipeline schedule as a picture
    schedule_problem.py, schedule_search.py  the search for short schedules
"""
