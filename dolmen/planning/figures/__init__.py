"""Pictures of the page of `dolmen plan`.

svg.py       shapes, axes and fills
ranking.py   layouts by time
memory.py    memory of ranks
timeline.py  the schedule
network.py   the cluster and its traffic
front.py     GPUs against days and cost
"""
