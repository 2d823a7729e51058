"""A plan as `dolmen plan` makes one, of numbers that are easy to check: 1 T parameters on 384
nodes, eight layouts.
"""

from dolmen.parallel.simulation import Cost, make_schedule, simulate_stages
from dolmen.planning.hardware import read_cluster
from dolmen.planning.ledger import Live
from dolmen.planning.plan import (
    Candidate,
    Fleet,
    Plan,
    Prices,
    StageMemory,
    Timeline,
    Traffic,
)
from dolmen.planning.step import Estimate

GIB = 2**30
PARTS = {
    "product": 0.58,
    "attention": 0.09,
    "memory": 0.08,
    "tp": 0.1,
    "pp": 0.02,
    "dp": 0.03,
    "bubble": 0.08,
    "optimizer": 0.02,
}


def estimate(seconds: float) -> Estimate:
    parts = {name: share * seconds for name, share in PARTS.items()}
    return Estimate(seconds, seconds * 0.88, seconds * 1.13, parts)


def memory(rank: int, ranks: int) -> StageMemory:
    ends = GIB * (rank in (0, ranks - 1))
    live = Live(
        int(9.5 * GIB) + ends,
        4 * GIB,
        4 * GIB,
        GIB // 2,
        20 * GIB,
        int((ranks - rank) / ranks * 24 * GIB),
        GIB // 3,
    )
    return StageMemory(live, 3 * GIB)


def candidate(tp: int, pp: int, seconds: float) -> Candidate:
    traffic = (
        Traffic("node", "tp", 310e9, seconds * 0.2),
        Traffic("leaf", "pp", 4e9, seconds * 0.01),
        Traffic("leaf", "dp", 20e9, seconds * 0.04),
        Traffic("core", "dp", 11e9, seconds * 0.03),
    )
    layout = {
        "layout.tp": tp,
        "layout.pp": pp,
        "layout.zero": 1,
        "layout.sequence-parallel": True,
        "layout.schedule": "interleaved",
        "layout.virtual-stages": 3,
        "layout.recompute": "full",
        "layout.recompute-layers": 4,
        "train.microbatch-size": 2,
    }
    return Candidate(
        layout,
        estimate(seconds),
        tuple(memory(r, pp) for r in range(pp)),
        "compute",
        0.44,
        traffic=traffic,
    )


def plan(pp: int = 8, micros: int = 24, schedule: str = "1f1b", nodes: int = 384) -> Plan:
    chunks = 2 if schedule in ("interleaved", "zero-bubble-v") else 1
    made = make_schedule(schedule, pp, micros, chunks)
    cost = Cost(0.9, 1.9, 1.0, 0.9, 0.01).chunk_cost(chunks)
    simulation = simulate_stages(made, (cost,) * made.stages)
    fleets = tuple(
        Fleet(n, estimate(98.0 * 3072 / n * (1 + n / 40000)), f"tp 8 pp {pp}")
        for n in (256, 512, 1024, 2048, 3072, 4480)
    )
    slow = Fleet(3500, estimate(108.0), "tp 16 pp 4")
    return Plan(
        "gpt-1t",
        1_008_000_000_000,
        2048,
        3072,
        read_cluster(f"dgx-a100:{nodes}"),
        nodes * 8,
        tuple(candidate(8, pp, 98.0 * (1 + i / 30)) for i in range(8)),
        Timeline(made, simulation),
        (*fleets, slow),
        considered=11_342,
        tokens=450e9,
        prices=Prices(rent=1.6, node=220_000, kilowatt_hour=0.12),
    )
