"""dolmen train RECIPE|FILE.yaml"""

from dolmen.launch import process
from dolmen.training import worker
from dolmen.training.request import Request


def run(request: Request) -> int:
    return worker.run(request, process.run_worker)
