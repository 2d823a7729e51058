"""The search for the shortest pipeline schedule.

problem.py  times, partial solutions and lower bounds
greedy.py   lists by preference
search.py   branch and bound; all of them
"""
