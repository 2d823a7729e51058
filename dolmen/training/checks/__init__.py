"""Rules across the options of a run and what they name: pure functions of a ResolvedRun, a module
per topic. Each raises ValueError with the value, the bound, the option and the remedy.

    run.py        the order of all rules; length, loss, layout, precision, evaluation, export
    model.py      initial weights, adapters, moments, new rows of the vocabulary
    exact.py      what exact numerics cover
    rollout.py    GRPO, PPO, rewards, critic
    folder.py     what the output folder holds, and whether it can be resumed or overwritten
    warn.py       warnings: what can be done, but is hardly intended
"""
