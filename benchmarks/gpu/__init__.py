"""What a GPU is asked when there is one: `make gpu`, or `python -m benchmarks.gpu --help`.

Stages in order of worth (stages/__init__.py), each a process of its own (runner.py), each a list of
cases (case.py) whose results are kept as they come (results.py). The report (report.py) turns them
into the GPU section of docs/performance.md. Nothing here needs a network or a person.
"""
