"""What is trained to something else than the cross-entropy of the next token, on the layouts of the
golden table, in float64: weights of tokens, preferences of a policy over another model on the same
mesh, rewards and values of a scalar head. A way to get it wrong is a fault of
benchmarks/mutation.
"""

from dataclasses import dataclass, replace
from functools import partial

import table
import torch
import torch.distributed as dist
from mechanisms import CONFIGS
from spawning import Row
from squared_error import TARGET, SquaredError
from table import FAMILIES, LENGTH, ROWS, SINGLE, Layout, Run
from tiny_models import Flat, Tiny, build, initialize

from dolmen.core.mesh import Mesh
from dolmen.data.batch import FOLLOWS, IGNORED, SIDE, Batch
from dolmen.model.spec import ScalarHeadSpec
from dolmen.objectives import forward
from dolmen.objectives.objective import CrossEntropy, MaskedLM, Objective
from dolmen.objectives.on_policy import (
    ADVANTAGE,
    OLD,
    RETURN,
    VALUE,
    GRPOLoss,
    PPOPolicyLoss,
    PPOValueLoss,
)
from dolmen.objectives.preference import DPO, KTO, REFERENCE, ReferenceFreePreference
from dolmen.objectives.reward import PairwiseRewardLoss
from dolmen.ops.attention import Documents
from dolmen.ops.rope import PositionIds
from dolmen.training.state import PretrainingLoss, TrainState

REFERENCE_MODEL, REFERENCE_SEED, TEXT_SEED, STEPS = FAMILIES["gpt2"], 5, 7, 2


@dataclass(frozen=True)
class Kind:
    """What is trained to what."""

    config: Flat | Tiny
    objective: Objective
    packed: bool = False
    """Of several examples in each row."""
    text: float = 0.0
    """What plain text counts beside it."""
    routed: bool = False
    """By experts that are given."""


def scalar(config: Flat) -> Tiny:
    """The same model with one number for each token in the place of logits."""
    return Tiny(replace(config.spec, head=ScalarHeadSpec()), config.training)


def table_of_experts(batch: Batch, mesh: Mesh) -> torch.Tensor:
    """Two different ones for each token and layer, whatever routers say."""
    first = mesh.dp.rank * len(batch.tokens)
    rows = torch.arange(first, first + len(batch.tokens))[:, None, None]
    own = rows * 5 + torch.arange(LENGTH)[:, None] * 3 + torch.arange(3) * 7
    return torch.stack((own % 8, (own + 1 + rows % 6) % 8), -1).flatten(2)


KINDS = {
    "weights": Kind(FAMILIES["gpt2"], CrossEntropy()),
    # weights, and positions that are looked up: each example has its own
    "chats": Kind(FAMILIES["gpt2"], CrossEntropy(), packed=True),
    "dpo": Kind(FAMILIES["llama"], DPO(0.5, rpo_alpha=0.3)),
    "dpo, capped": Kind(CONFIGS["gemma2"], DPO(0.5)),
    "dpo, experts": Kind(FAMILIES["qwen3-moe"], DPO(0.5)),
    # answers that are wanted or not, and beside each one to another prompt
    "kto": Kind(FAMILIES["llama"], KTO(0.5, 1.0, 0.6), packed=True),
    "preferred": Kind(scalar(FAMILIES["llama"]), PairwiseRewardLoss()),
    # several answers in each row
    "rewards": Kind(scalar(FAMILIES["llama"]), PairwiseRewardLoss(0.1, 0.2), packed=True),
    "orpo": Kind(FAMILIES["llama"], ReferenceFreePreference("orpo", 0.5), packed=True),
    # masked tokens and pairs of texts of an encoder
    "filling": Kind(CONFIGS["bert"], MaskedLM(2.0)),
    "values": Kind(scalar(FAMILIES["gpt2"]), SquaredError()),
    # answers that were drawn: means over rows, over tokens, and ratios of whole answers
    "grpo": Kind(FAMILIES["llama"], GRPOLoss(beta=0.1, temperature=0.7)),
    "dapo": Kind(FAMILIES["gpt2"], GRPOLoss("dapo", clip_high=0.28, beta=0.1)),
    "undecided": Kind(FAMILIES["llama"], GRPOLoss(beta=0.1, entropy_coef=0.3, temperature=0.7)),
    "gspo": Kind(FAMILIES["llama"], GRPOLoss("gspo", "sequence", beta=0.1)),
    # the two models of PPO
    "policy": Kind(FAMILIES["llama"], PPOPolicyLoss(dual_clip=1.5, temperature=0.7)),
    "critic": Kind(scalar(FAMILIES["gpt2"]), PPOValueLoss(0.2)),
    "policy, undecided": Kind(
        FAMILIES["llama"], PPOPolicyLoss(dual_clip=1.5, temperature=0.7, entropy_coef=0.3)
    ),
    # and text beside what is drawn, of a model with experts and one without
    "policy, routed": Kind(FAMILIES["qwen3-moe"], PPOPolicyLoss(dual_clip=1.5), routed=True),
    "policy, text": Kind(FAMILIES["gpt2"], PPOPolicyLoss(dual_clip=1.5), text=3.0),
    "policy, text, experts": Kind(FAMILIES["qwen3-moe"], PPOPolicyLoss(dual_clip=1.5), text=3.0),
}


def pairs(rows: torch.Tensor) -> torch.Tensor:
    """Of every third row the second text does not follow the first."""
    said = torch.zeros(len(rows), LENGTH, dtype=torch.float64)
    said[:, 0] = torch.where(rows % 3 == 0, -1.0, 1.0).double()
    return said


def typed(batch: Batch) -> Batch:
    """Two texts in each row, which end at the middle and at the end."""
    index = torch.arange(LENGTH).expand_as(batch.tokens)
    ids = torch.stack((index, (index >= LENGTH // 2).long()), 1)
    return replace(batch, positions=PositionIds.from_ids(ids))


def batches(mesh: Mesh) -> list[Batch]:
    """Of table.batches, with weights and targets of each token, some of weight 0. Labels begin and
    end at other places in every row, and each row has some: the sequences of a pair are unlike.
    """
    out = []
    for step, batch in enumerate(table.batches(mesh)[:STEPS]):
        rows = ROWS // mesh.dp.size
        mine = torch.arange(mesh.dp.rank * rows, (mesh.dp.rank + 1) * rows)
        sampled = torch.rand(
            2, ROWS, LENGTH, generator=torch.Generator().manual_seed(step)
        ).double()
        weights, targets = sampled[:, mine]
        places = torch.arange(LENGTH)
        real = (places >= mine[:, None] % 4) & (places < LENGTH - mine[:, None] // 3 % 4)
        out.append(
            replace(
                batch,
                labels=torch.where(real, batch.tokens.roll(-1, 1), IGNORED),
                weights=torch.where(weights < 0.2, 0.0, weights),
                numbers={TARGET: 2 * targets - 1, FOLLOWS: pairs(mine)},
            )
        )
    return out


def packed(batch: Batch, mesh: Mesh) -> Batch:
    """Examples of three to five tokens in each row, the last of which predicts nothing; in two rows
    that are a pair as many, each with a label, and the second one preferred in half of them.
    """
    first = mesh.dp.rank * len(batch.tokens)
    rows = torch.arange(first, first + len(batch.tokens))[:, None]
    sizes = 3 + rows // 2 % 3
    places = torch.arange(LENGTH)
    labels = torch.where(places % sizes == sizes - 1, IGNORED, batch.tokens.roll(-1, 1))
    side = torch.where(rows % 2 == rows // 2 % 2, 1.0, -1.0).double().expand(-1, LENGTH)
    made = replace(
        batch,
        labels=labels,
        documents=Documents.from_starts(places // sizes * sizes),
        numbers={**batch.numbers, SIDE: side},
    )
    return made.add_positions(1)


def wanted(batch: Batch, mesh: Mesh) -> Batch:
    """Of the answers of `packed`, which lie side by side, those of one row, the first or the
    second, are wanted or not by turns, and those of the other answer other prompts. By turns of the
    pairs of rows the reference is further away: so z is over 0 in half of them.
    """
    first = mesh.dp.rank * len(batch.tokens)
    rows = torch.arange(first, first + len(batch.tokens))[:, None]
    number = (batch.starts == torch.arange(LENGTH)).cumsum(1)
    side = torch.where((number + rows // 2) % 2 == 0, 1.0, -1.0).double()
    own = rows % 2 == rows // 2 % 2
    away = batch.numbers[REFERENCE] - 3 * (rows // 2 % 2)
    numbers = {SIDE: torch.where(own, side, 0.0), REFERENCE: away}
    return replace(batch, numbers={**batch.numbers, **numbers})


def valued(batch: Batch) -> Batch:
    """With a value that moves by more than the clip in some tokens, and a return."""
    sampled = batch.numbers[TARGET]
    return replace(batch, numbers={**batch.numbers, VALUE: sampled / 4, RETURN: sampled.flip(1)})


def compared(train: TrainState, mesh: Mesh, layout: Layout, **dtypes) -> list[Batch]:
    """`batches` with what another model on the same mesh makes of them, if the objective compares
    with one. That model stays as it is.
    """
    given = batches(mesh)
    if isinstance(train.objective, MaskedLM):
        return [typed(batch) for batch in given]
    if isinstance(train.objective, PPOValueLoss):
        return [valued(batch) for batch in given]
    if not isinstance(train.objective, (DPO, KTO, GRPOLoss, PPOPolicyLoss)):
        return given
    other = build(REFERENCE_MODEL, mesh, layout, train.schedule, **dtypes)
    initialize(other, REFERENCE_SEED)
    out = []
    for batch in given:
        found = forward.log_probabilities(other, batch, mesh, train.schedule)
        sampled = {OLD: found, ADVANTAGE: batch.numbers[TARGET]}
        out.append(replace(batch, numbers={**batch.numbers, **sampled, REFERENCE: found}))
    assert all(p.grad is None for p in other.parameters())
    return out


def run(kind: str, mesh: Mesh, layout: Layout, **dtypes) -> Run:
    """Updates of one process or of a layout, in float64 or as `dtypes` say."""
    dtypes = dtypes or {"dtype": torch.float64}
    config, objective = KINDS[kind].config, KINDS[kind].objective
    train = table.start(config, mesh, layout, objective=objective, **dtypes)
    given = compared(train, mesh, layout, **dtypes)
    if KINDS[kind].packed:
        given = [packed(batch, mesh) for batch in given]
    if KINDS[kind].routed:
        given = [replace(one, experts=table_of_experts(one, mesh)) for one in given]
    if KINDS[kind].text:
        read = table.batches(mesh, seed=TEXT_SEED)
        train.pretraining = PretrainingLoss(KINDS[kind].text, lambda step: read[step])
    if isinstance(objective, KTO):
        given = [wanted(batch, mesh) for batch in given]
    return table.updates(train, mesh, given)


ALONE: dict[str, Run] = {}


def alone(kind: str) -> Run:
    """One process: made once for all rows that are compared with it."""
    if kind not in ALONE:
        ALONE[kind] = run(kind, SINGLE, Layout())
    return ALONE[kind]


def compare(kind: str, layout: Layout) -> dict[str, tuple[float, str]]:
    """Largest differences from one process."""
    return table.differences(run(kind, layout.mesh(torch.device("cpu")), layout), alone(kind))


def scored(mesh: Mesh, layout: Layout) -> torch.Tensor:
    """Of each token of the first batch its log-probability in one model, its value in another, and
    what one with experts says, and by which, all on the mesh.
    """
    schedule = layout.make_schedule(ROWS, ROWS // mesh.dp.size // layout.accumulation)
    found = []
    for config, ask in (
        (REFERENCE_MODEL, forward.log_probabilities),
        (KINDS["values"].config, forward.values),
    ):
        model = build(config, mesh, layout, schedule, dtype=torch.float64)
        initialize(model, REFERENCE_SEED)
        found.append(ask(model, batches(mesh)[0], mesh, schedule))
    model = build(KINDS["policy, routed"].config, mesh, layout, schedule, dtype=torch.float64)
    initialize(model, REFERENCE_SEED)
    routed = forward.routed_log_probabilities(model, batches(mesh)[0], mesh, schedule)
    return torch.cat([torch.stack(found, 1), routed.movedim(-1, 1)], 1)


def scores_of_all_ranks(layout: Layout) -> float:
    """The largest difference of any rank's from what one process has of the same rows."""
    mesh = layout.mesh(torch.device("cpu"))
    rows = ROWS // mesh.dp.size
    want = scored(SINGLE, Layout())[mesh.dp.rank * rows :][:rows]
    off = float((scored(mesh, layout) - want).abs().max())
    everyone = [0.0] * mesh.size
    dist.all_gather_object(everyone, off)
    return max(everyone)


def half(kind: str, layout: Layout) -> tuple[float, float]:
    """How far loss and norm of the first step in bfloat16, over fp32 masters, are from one process
    in float64, relative.
    """
    dtypes = dict(dtype=torch.float32, compute=torch.bfloat16)
    got, want = run(kind, layout.mesh(torch.device("cpu")), layout, **dtypes), alone(kind)
    return abs(got.losses[0] / want.losses[0] - 1), abs(got.norms[0] / want.norms[0] - 1)


def rows(kind: str, layouts: str) -> list[Row]:
    """A row per line; a bar at its end makes it one of the full tier."""
    made = []
    for line in filter(None, map(str.strip, layouts.splitlines())):
        words, full, _ = line.partition("|")
        layout = Layout.of(words)
        call = partial(compare, kind, layout)
        made.append(Row(f"{layout}-{kind}", layout.world, call, bool(full)))
    return made


OBJECTIVES = [
    *rows(
        "grpo",
        """
        cp2 pp2 acc4 zero1
        dp2 tp2 sp zero3 |
        """,
    ),
    *rows("dapo", "cp2 tp2 sp"),
    *rows("gspo", "cp4 gather"),
    *rows(
        "policy",
        """
        cp2 pp2 acc4 zero1 |
        dp2 tp2 sp zero3
        cp4 gather                    |
        pp2 acc4 zero-bubble-v v2     |
        pp2 dp2 tp2 sp acc4 zero3     |
        """,
    ),
    *rows(
        "critic",
        """
        cp2 pp2 acc4 zero1
        dp2 tp2 sp zero3 |
        tp2 acc4 zero-bubble          |
        pp2 dp2 tp2 sp acc4 zero3     |
        """,
    ),
    *rows(
        "policy, text",
        """
        cp2 pp2 acc4 zero1
        dp2 tp2 sp zero3 |
        dp4 acc2 |
        dp2 zero1                     |
        tp2 sp                        |
        cp2                           |
        pp2 acc4 zero-bubble          |
        tp2 acc4 zero-bubble          |
        pp2 dp2 tp2 sp acc4 zero3     |
        """,
    ),
    *rows(
        "policy, routed",
        """
        cp2 dp2 ep4 zero1
        pp2 tp2 sp acc4
        cp2                           |
        pp2 acc4                      |
        dp2 ep2                       |
        pp2 dp2 ep2 acc4 zero-bubble zero1 |
        """,
    ),
    *rows("policy, undecided", "cp2 tp2 sp acc4 |"),
    *rows("policy, text, experts", "dp2 ep2 zero1\ndp2 tp2 sp ep2 zero2 |"),
    *rows(
        "weights",
        """
        tp2 sp zero1 acc4 |
        cp2 pp2 acc4 zero1
        dp4 zero3                     |
        pp2 acc4 zero-bubble          |
        """,
    ),
    *rows(
        "chats",
        """
        cp2 pp2 acc4 zero1
        dp2 tp2 sp zero3              |
        tp2 acc4 zero-bubble          |
        cp4 gather                    |
        dp4 zero3 acc2                |
        """,
    ),
    *rows(
        "dpo",
        """
        tp2
        tp2 sp acc4 zero-bubble       |
        pp2 acc4 interleaved v2 zero1
        pp2 acc4 zero-bubble-v v2 zero2 |
        cp4 gather                    |
        dp4 zero3 acc2                |
        cp2 tp2 sp acc4               |
        dp2 tp2 sp zero3              |
        pp2 dp2 acc4 zero3
        cp2 dp2 zero2 full            |
        pp2 dp2 tp2 sp acc4 zero3     |
        dp2 cp2 tp2 sp zero3          |
        """,
    ),
    *rows("dpo, capped", "tp2\ncp2 tp2 sp |"),
    *rows("dpo, experts", "dp2 ep2 zero1 |\npp2 dp2 ep2 acc4 zero-bubble zero1 |"),
    *rows(
        "preferred",
        """
        tp2 sp zero1 acc4 zero-bubble
        cp2 pp2 acc4 zero1
        dp2 tp2 sp zero3              |
        cp4                           |
        pp2 dp2 tp2 sp acc4 zero3     |
        """,
    ),
    *rows("rewards", "cp2 pp2 acc4 zero1\ndp2 tp2 sp zero3 |\ncp4 gather |"),
    *rows("orpo", "cp2 tp2 sp acc4\npp2 dp2 acc4 zero3 |"),
    *rows("kto", "cp2 pp2 acc4 zero1\ndp2 tp2 sp zero3 |\ncp4 gather |"),
    *rows("undecided", "cp2 tp2 sp acc4\npp2 dp2 acc4 zero3 |"),
    *rows(
        "filling",
        """
        tp2 sp zero1 acc4 |
        dp2 tp2 zero3                 |
        cp2 pp2 acc4 zero1
        tp2 acc4 zero-bubble          |
        cp4 gather                    |
        """,
    ),
    *rows(
        "values",
        """
        cp2 dp2 zero3 full
        tp4                           |
        pp4 acc4                      |
        """,
    ),
]
