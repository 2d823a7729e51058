"""The search for the shortest pipeline schedule.

problem.py  times, partial solutions and lower bounds
greedy.py   lists by preference
exact.py    branch and bound
search.py   all of them
"""
