"""Losses: pure functions of log-probabilities, values or scores (policy.py, advantage.py,
preference.py, reward.py), and the objectives of a run, which call them on the last hidden vectors.
"""
