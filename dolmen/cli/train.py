"""dolmen train RECIPE|FILE.yaml"""

from dolmen.launch import process
from dolmen.training import job
from dolmen.training.request import Request


def run(request: Request) -> int:
    return job.run(request, process.guarded)
