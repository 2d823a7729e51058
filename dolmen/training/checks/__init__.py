"""Rules across the options of a run and what they name: pure functions of a ResolvedRun, a module
per topic. Each raises ValueError with the value, the bound, the option and the remedy.

    run.py        which rules apply, in order          length.py      steps, tokens, epochs, profile
    model.py      initial weights, adapters, moments   objective.py   loss, rows of data, reference
    rollout.py    GRPO, PPO, rewards, critic           precision.py   rounding and layout
    folder.py     what the output folder holds         evaluation.py  tasks, samples, export
    warn.py       warnings: what can be done, and is hardly meant
"""
