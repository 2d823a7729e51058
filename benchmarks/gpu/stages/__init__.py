"""The stages, in order of worth. A stage more is a file here with `cases(context)`, and a line."""

from benchmarks.gpu.runner import Stage

HERE = "benchmarks.gpu.stages"
STAGES = (
    Stage(f"{HERE}.device", 32, "what machine this is, and what it does at most"),
    Stage(f"{HERE}.families", 60, "each family's tiny model, one step compared with the CPU's"),
    Stage(f"{HERE}.nccl", 28, "NCCL with one rank: every collective"),
    Stage(f"{HERE}.golden", 85, "rows of the second golden table, beside their frozen numbers"),
    Stage(f"{HERE}.training", 85, "`dolmen train`: a run, its checkpoint, and the run resumed"),
    Stage(f"{HERE}.ops", 62, "each operator compared with float64"),
    Stage(f"{HERE}.fp8", 25, "products of eight bits: the bits of a CPU, and how fast they are"),
    Stage(f"{HERE}.throughput", 495, "steps of large shapes, beside transformers and plain torch"),
    Stage(f"{HERE}.profile", 105, "where the time of a step goes, by kind"),
    Stage(f"{HERE}.memory", 60, "peak memory, beside the closed forms"),
    Stage(f"{HERE}.compiling", 185, "with and without torch.compile"),
    Stage(f"{HERE}.generation", 70, "greedy text from a cache, beside transformers"),
    Stage(f"{HERE}.ranks", 130, "two ranks that share the GPU over gloo"),
)
GROUPS = {"smoke": ("device", "families", "golden", "training", "nccl", "ranks")}


def chosen(stages: list[str] | None, skip: list[str] | None) -> list[Stage]:
    """Those asked for, in order; names of stages and of groups. Raises ValueError for others."""
    known = {stage.name for stage in STAGES}

    def names(words: list[str] | None) -> set[str]:
        for word in words or []:
            if word not in known and word not in GROUPS:
                raise ValueError(
                    f"{word} is no stage: use {', '.join([*GROUPS, *(s.name for s in STAGES)])}"
                )
        return {name for word in words or [] for name in GROUPS.get(word, (word,))}

    wanted = names(stages) or known
    return [s for s in STAGES if s.name in wanted - names(skip)]
