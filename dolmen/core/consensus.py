"""Agreement between all ranks of the default group: comparing facts, gathering objects, and turning
one rank's error into everybody's.

Ranks on hosts that differ in an option or in a source file would train something that is neither,
or hang in collectives of different shapes. So one digest per rank is gathered at the start; only if
digests differ, the facts themselves are.
"""

import hashlib
import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")
SHOWN = 6  # facts listed per host


def gather_objects(mine: Any) -> list[Any]:
    """Return a list with one picklable object per rank of the default group, by rank, on every
    rank. `mine`: this rank's. Collective.
    """
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    return gathered


def hash_sources(folder: Path) -> dict[str, str]:
    """Return a short hash of each .py file at any depth below `folder`, by "code RELATIVE/PATH":
    facts for `require_same`.
    """
    files = sorted(folder.rglob("*.py"))
    return {
        f"code {path.relative_to(folder)}": hashlib.blake2b(
            path.read_bytes(), digest_size=6
        ).hexdigest()
        for path in files
    }


def require_same(
    facts: dict[str, Any],
    what: str = "agree on what to do",
    mend: str = "give every host the same command, the same version of dolmen and of torch",
) -> None:
    """Raise ValueError on every rank, with one message, unless all ranks have the same `facts`
    (JSON values by name). The message begins "the ranks do not `what`", lists per host which ranks
    differ from rank 0, and in which facts, and ends with `mend`, how to fix it. Collective.
    """
    digest = hashlib.blake2b(
        json.dumps(facts, sort_keys=True, default=str).encode(), digest_size=16
    ).hexdigest()
    # 16 bytes per rank in the usual case; facts are sent only when they differ
    if len(set(gather_objects(digest))) == 1:
        return
    facts_by_rank = gather_objects((socket.gethostname(), facts))
    host, first = facts_by_rank[0]
    lines: dict[str, list[int]] = {}
    for rank, (where, other) in enumerate(facts_by_rank):
        names = [n for n in {**first, **other} if first.get(n) != other.get(n)]
        if names:
            # ranks of a host usually differ in the same: one line for them
            lines.setdefault(f"on {where}: {_differences(names, first, other)}", []).append(rank)
    mismatches = [
        f"rank {', '.join(map(str, ranks[:8]))}{' ...' if len(ranks) > 8 else ''} {line}"
        for line, ranks in lines.items()
    ]
    raise ValueError(
        "\n  ".join(
            [
                f"the ranks do not {what}; compared with rank 0 on {host},",
                *mismatches,
                mend,
            ]
        )
    )


def _differences(names: list[str], first: dict, other: dict) -> str:
    """Return "NAME value, here value" for the first SHOWN names, with the values of `other` and
    then of `first` (rank 0, "here"), and how many more names there are.
    """

    def value(of: dict, name: str) -> str:
        """Return the fact called `name` as text, `absent` where there is none."""
        return str(of.get(name, "absent"))

    differences = [f"{n} {value(other, n)}, here {value(first, n)}" for n in names[:SHOWN]]
    return "; ".join(differences) + (
        f"; and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    )


def run_on_all_ranks(work: Callable[[], T]) -> T:
    """Run `work()` on every rank and return this rank's result. If it raises ValueError or OSError
    on any rank, all raise ValueError with the lowest rank's message, so that none hangs; any other
    exception is raised where it occurs, and ValueError on the others. Collective: `work` may use
    collectives only where all ranks reach them.
    """
    results: list[T] = []
    message = None
    try:
        results.append(work())
    except (ValueError, OSError) as error:
        message = str(error)
    except Exception as error:
        gather_objects(f"rank {dist.get_rank()} failed: {error!r}")
        raise
    # every rank meets here, whether its work succeeded or not
    if messages := [text for text in gather_objects(message) if text is not None]:
        raise ValueError(messages[0])
    return results[0]


def run_on_rank_zero(work: Callable[[], T]) -> T:
    """Run `work()` on rank 0 alone and return its result on every rank; its ValueError or OSError
    becomes a ValueError on every rank. Any other exception is raised on rank 0, and ValueError on
    the others. Collective; the result must be picklable.
    """
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = work()
        except (ValueError, OSError) as error:
            outcome[1] = str(error)
        except Exception as error:
            # the others wait in this broadcast: they must hear of it before this rank ends
            dist.broadcast_object_list([None, f"rank 0 failed: {error!r}"])
            raise
    dist.broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise ValueError(outcome[1])
    return outcome[0]
