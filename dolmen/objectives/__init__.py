"""Losses, and the objectives of a run that call them.

Pure functions of log-probabilities, values or scores, for any loop
    policy.py       losses of PPO, GRPO and variants, and of critics
    advantage.py    rewards, KL estimators, GAE, group baselines
    preference.py   DPO and variants, KTO, SimPO, ORPO; and their objectives
    reward.py       losses of reward and value models; and their objectives
    masked.py       means under a mask
Objectives: called with the last hidden vectors and the model's head, on the last stage
    objective.py    the interface, cross-entropy, masked LM
    pairs.py        completions packed in pairs
    on_policy.py    GRPO and PPO: policies and critics over layouts
    forward.py      forward passes without gradients: log-probabilities, values, scores
    config.py       options under `--objective`
"""
