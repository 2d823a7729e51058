"""Which tests of `-n 3 --dist loadfile` run on one worker, one after the other: those of a file,
which share what its fixtures made; and rows, which share spawns (conftest.py: `result`): those of
the golden table, and all others, so that two workers have as much of them.
"""

from xdist.scheduler import LoadFileScheduling

GOLDEN = "tests/golden/"
ROWS = (
    "tests/parallel/test_assembly.py",
    "tests/parallel/test_integers.py",
    "tests/parallel/test_styles.py",
    "tests/rl/test_exact_rollouts.py",
    "tests/rl/test_generation_model.py",
    "tests/rl/test_iteration_over_layouts.py",
    "tests/comparison/test_diff.py",
    "tests/conversion/test_source.py",
    "tests/families/test_over_layouts.py",
    "tests/planning/test_dryrun.py",
    "tests/training/test_modules.py",
    "tests/training/test_reads.py",
)


def group_of(nodeid: str) -> str:
    """The name of the group of a test: the tests of a group run on one worker."""
    if nodeid.startswith(GOLDEN):
        return GOLDEN
    return ROWS[0] if nodeid.startswith(ROWS) else nodeid.partition("::")[0]


class ByFile(LoadFileScheduling):
    """Schedules the tests of a group on one worker."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)
