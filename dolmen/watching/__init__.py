"""Runs as a page (`dolmen show`). Imports no torch.

run.py      the files of a run's folder, read while they grow
series.py   numbers by step, thinned
page.py     one HTML file, and a server that keeps it up to date
"""
