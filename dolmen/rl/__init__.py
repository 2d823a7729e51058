"""Reinforcement learning: rollouts as training batches. Read iteration.py first.

iteration.py        one rollout iteration, from weights to batches
prompts.py          prompts and their order
generation.py       the model copy that generates; dynamic sampling
environment.py      multi-turn completions
rewards.py          rules, functions and reward models
function_worker.py  a user's function in a worker process
targets.py          advantages, returns, the KL coefficient
rollout.py          the tensors of an iteration, and their files
offload.py          models kept in host memory while not in use
best_of_n.py        the best of several samples
config.py           options under `--rollout`, `--ppo` and `--critic`
"""
