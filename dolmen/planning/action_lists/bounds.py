"""How short no schedule can be: the largest of several relaxations, each of which forgets all but
one rank or one stage.

    f_s, i_s, w_s   times of stage s; down(s) from the start of F at s to the end of F at the last
    head(s)         until a first microbatch is at s: all F before, and their sends
    back(s)         from the end of F at s until its gradient is at s, at the earliest
    R_s             f_s + back(s) + i_s + w_s: how long a microbatch is held at s, at least
"""

from itertools import accumulate

from dolmen.planning.action_lists.problem import Partial, Problem


class Paths:
    """Lengths of the chains that a microbatch runs through, by stage."""

    def __init__(self, problem: Problem):
        costs, last = problem.costs, problem.stages - 1
        input_ = [cost.input if problem.splits else cost.backward for cost in costs]
        up = [cost.forward + problem.send(s, min(s + 1, last)) for s, cost in enumerate(costs)]
        self.head = [0.0, *accumulate(up)][: problem.stages]
        # from the end of I at s until all is over: the I of every stage before, then the last W
        rest = [costs[s].weight if problem.splits else 0.0 for s in range(problem.stages)]
        self.out = [rest[0]]
        for s in range(1, problem.stages):
            self.out.append(max(rest[s], problem.send(s, s - 1) + input_[s - 1] + self.out[s - 1]))
        # from the end of F at s until its gradient is there
        self.back = [0.0] * problem.stages
        for s in range(last - 1, -1, -1):
            there = problem.send(s, s + 1) + costs[s + 1].forward + self.back[s + 1]
            self.back[s] = there + input_[s + 1] + problem.send(s + 1, s)
        self.input, self.rest = input_, rest
        self.hold = [
            cost.forward + self.back[s] + input_[s] + rest[s] for s, cost in enumerate(costs)
        ]

    def tail(self, stage: int, kind: str) -> float:
        """From the end of an action until all that follows from it is over."""
        if kind == "F":
            return self.back[stage] + self.input[stage] + self.out[stage]
        return 0.0 if kind == "W" else self.out[stage]


def bound(problem: Problem) -> float:
    """No schedule is shorter. The formulas are in docs/pipeline.md."""
    paths = Paths(problem)
    return max(
        *(_rank(problem, paths, rank) for rank in range(problem.ranks)),
        *(_chains(problem, paths, stage) for stage in range(problem.stages)),
    )


def _rank(problem: Problem, paths: Paths, rank: int) -> float:
    """A rank works from its head on; until its first gradient is back it has only as many forwards
    to do as it may hold; and no rank holds more at once than its slots.
    """
    stages = sorted({problem.works[i].stage for i in problem.by_rank[rank]})
    work = problem.micros * sum(problem.works[i].seconds for i in problem.by_rank[rank])
    head = min(paths.head[s] for s in stages)
    first = min(paths.head[s] + problem.costs[s].forward + paths.back[s] for s in stages)
    dearest = sorted((problem.costs[s].forward for s in stages), reverse=True)
    each = [forward for forward in dearest for _ in range(problem.micros)][: problem.slots]
    held = problem.micros * sum(paths.hold[s] for s in stages)
    return max(head + work, first + work - sum(each), head + held / problem.slots)


def _chains(problem: Problem, paths: Paths, stage: int) -> float:
    """All of one kind at a stage, one after another, then what follows from the last. With one
    chunk per rank, F of microbatch k + M waits for W of k; and M before the last must be whole.
    """
    cost, micros, slots = problem.costs[stage], problem.micros, problem.slots
    head = paths.head[stage]
    found = [head + micros * cost.forward + paths.tail(stage, "F")]
    first = head + cost.forward + paths.back[stage]
    found.append(first + micros * paths.input[stage] + paths.out[stage])
    if problem.chunks == 1:
        rounds, over = divmod(micros - 1, slots)
        found.append(head + over * cost.forward + (rounds + 1) * paths.hold[stage])
        whole = max(0, micros - slots) * (paths.input[stage] + paths.rest[stage])
        found.append(head + micros * cost.forward + whole + paths.tail(stage, "F"))
    return max(found)


def remaining(partial: Partial, paths: Paths) -> float:
    """No completion of a partial schedule is shorter: each rank has its work left to do, and after
    the last of a kind at a stage comes what follows from it.
    """
    problem = partial.problem
    longest = 0.0
    for rank, indices in enumerate(problem.by_rank):
        clock, left = partial.clock[rank], 0.0
        for index in indices:
            work = problem.works[index]
            todo = (problem.micros - partial.count[index]) * work.seconds
            if todo:
                left += todo
                longest = max(longest, clock + todo + paths.tail(work.stage, work.kind))
        longest = max(longest, clock + left)
    return longest
