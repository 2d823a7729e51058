"""The life of the processes of a run.

launcher.py     starts them on this machine, restarts them, and ends them together
fork_server.py  imports what workers need once, and forks them
process.py      what a process knows of who started it, signals, exit codes
rendezvous.py   a fresh rendezvous for each restart
watchdog.py     names the rank that hangs
config.py       options of `dolmen launch`
jobs.py         job files of SLURM, Kubeflow Trainer and SkyPilot (templates/)
"""
