"""Published training runs, what the planner predicts of them, and how far off that is.

    python -m benchmarks.planning.accuracy [ROWS.csv ...]   predicted beside measured
    python -m benchmarks.planning.calibrate ROWS.csv        efficiencies that fit your own runs
    python -m benchmarks.planning.scaling --out FILE        weak scaling of 2104.04473, drawn

runs/ holds the rows with their sources; published.py reads them; models.py, clusters.py, jobs.py
and programs.py say what model, network, layout and framework a row was; forecast.py predicts a
job; predict.py takes the median where a row leaves something open.
"""
