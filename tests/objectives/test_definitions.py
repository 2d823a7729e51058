"""Objectives on one process against their definitions, written out in float64 on the models of
`transformers`; what they refuse. That no layout changes them: tests/golden.
"""

import contextlib
import io
import math
from dataclasses import replace

import pytest
import torch
import transformers
from squared_error import TARGET, SquaredError
from stored import exported_trained
from tiny_models import Flat, Tiny, build, initialize
from torch import Tensor
from wide import Wide, double

from dolmen.conversion.source import ModelSource, load_weights, open_source
from dolmen.core import state
from dolmen.core.mesh import SINGLE
from dolmen.data.batch import IGNORED, MARGIN, SIDE, Batch
from dolmen.evaluation.validate import mean_loss
from dolmen.model.decoder import Decoder
from dolmen.model.spec import ScalarHeadSpec
from dolmen.objectives import forward, pairs
from dolmen.objectives.objective import CrossEntropy, check
from dolmen.objectives.preference import DPO, KTO, REFERENCE, meaningful_metrics
from dolmen.objectives.reward import CalibratedRewardLoss, PairwiseRewardLoss
from dolmen.ops.attention import Documents
from dolmen.optim.optimizer import OptimizerConfig, adamw
from dolmen.parallel.simulation import make_schedule
from dolmen.training.state import TrainState
from dolmen.training.step import optimizer_step

PADDING, LENGTH = 60, 12
OWN = dict(bos_token_id=None, eos_token_id=None, pad_token_id=PADDING)
LLAMA = (
    "llama",
    dict(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        **OWN,
    ),
)
GPT2 = "gpt2", dict(vocab_size=61, n_embd=16, n_layer=3, n_head=2, n_positions=16, **OWN)
# gradients by the largest element of the tensor: the order of sums in float64
TOLERANCE = 1e-12


def stored(kind: str, fields: dict, seed: int, folder) -> transformers.PreTrainedModel:
    """A model of random weights, in fp32, and saved to `folder`."""
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(kind, **fields)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape) * 0.2 + (p.ndim == 1))
    with contextlib.redirect_stderr(io.StringIO()):
        model.save_pretrained(folder)
    return model


def theirs_and_ours(kind: str, fields: dict, seed: int, folder):
    """The same model in transformers and here, in fp64, and what was read."""
    made = stored(kind, fields, seed, folder)
    theirs = double(made.config)
    theirs.load_state_dict(made.state_dict())
    source = open_source(folder)
    ours = Decoder(source.spec).double()
    load(ours, source)
    return theirs, ours, source


def load(model: Decoder, source: ModelSource) -> None:
    """All that the model has of the source."""
    parameters = dict(model.named_parameters())

    def write(name: str, full: Tensor) -> None:
        if name in parameters:
            state.write_region(parameters[name], full.double())

    with torch.no_grad():
        load_weights(source, write)


def batch() -> Batch:
    """Two pairs, of prompts of three tokens and answers of 2 to 9; then padding."""
    random = torch.Generator().manual_seed(7)
    tokens = torch.randint(PADDING, (4, LENGTH), generator=random)
    labels = torch.randint(PADDING, (4, LENGTH), generator=random)
    places, ends = torch.arange(LENGTH), torch.tensor([[12], [5], [7], [10]])
    return Batch(
        torch.where(places < ends, tokens, PADDING),
        torch.where((places >= 3) & (places < ends), labels, IGNORED),
        numbers={TARGET: torch.rand(4, LENGTH, generator=random).double()},
    )


def evaluate_objective(objective, model: Decoder, given: Batch) -> tuple[Tensor, dict[str, float]]:
    """The loss with its graph, and the metrics."""
    count = objective.count(given)
    found = model(
        given.tokens,
        lambda hidden, head: objective(hidden, head, given),
        documents=given.documents,
        positions=given.positions,
    )
    reported = {n: float(m) / count for n, m in zip(objective.names, found.metrics, strict=True)}
    return found.total / count, reported


def texts(model: torch.nn.Module, given: Batch) -> Tensor:
    """Log-probabilities of the labels [sequences, length], 0 where there is none."""
    with Wide():
        logits = model(input_ids=given.tokens, use_cache=False).logits
    real = given.labels != IGNORED
    index = torch.where(real, given.labels, 0)[..., None]
    return logits.log_softmax(-1).gather(2, index)[..., 0] * real


def compare(ours: Decoder, source: ModelSource, theirs: torch.nn.Module) -> None:
    """Gradients of all parameters that both have."""
    gradients = {name: p.grad for name, p in ours.named_parameters()}
    params = source.spec.params

    def full(name: str) -> Tensor:
        return gradients.get(name, torch.zeros(params[name].shape).double())

    got = dict(exported_trained(source.model, full))
    wanted = {name: p.grad for name, p in theirs.named_parameters() if name in got}
    assert len(wanted) >= len(got) - 1
    largest = max(g.abs().max() for g in wanted.values())
    for name, want in wanted.items():
        off = (got[name] - want).abs().max() / max(want.abs().max(), 1e-3 * largest)
        assert off < TOLERANCE, f"{name}: {off:.1e}"


def test_dpo_of_two_models(tmp_path):
    """A policy of one family, a reference of another."""
    theirs, ours, source = theirs_and_ours(*LLAMA, 0, tmp_path / "policy")
    their_reference, reference, _ = theirs_and_ours(*GPT2, 1, tmp_path / "reference")
    given, schedule = batch(), make_schedule("1f1b", 1, 2)
    found = forward.log_probabilities(reference, given, SINGLE, schedule)
    with torch.no_grad():
        other = texts(their_reference, given)
    torch.testing.assert_close(found, other, rtol=TOLERANCE, atol=TOLERANCE)

    loss, metrics = evaluate_objective(DPO(0.3), ours, replace(given, numbers={REFERENCE: found}))
    ratios = (texts(theirs, given) - other).sum(1)
    margins = 0.3 * torch.stack([ratios[0] - ratios[1], ratios[2] - ratios[3]])
    want = torch.log(1 + torch.exp(-margins)).mean()
    torch.testing.assert_close(loss, want, rtol=TOLERANCE, atol=0)
    loss.backward()
    want.backward()
    compare(ours, source, theirs)
    assert metrics["rewards/accuracies"] == (margins > 0).double().mean()
    logps = texts(theirs, given).sum(1)
    of_sides = {"rewards": 0.3 * ratios, "logps": logps}
    means = {f"{name}/chosen": x[0::2].mean() for name, x in of_sides.items()}
    means |= {f"{name}/rejected": x[1::2].mean() for name, x in of_sides.items()}
    means["rewards/margins"] = margins.mean()
    for name, mean in means.items():
        assert metrics[name] == pytest.approx(mean.item(), rel=TOLERANCE), name
    assert all(p.grad is None for p in reference.parameters())


def test_ipo_of_two_models():
    """Log-ratios per token of an answer."""
    model = training(DPO()).model
    given = replace(GIVEN, numbers={REFERENCE: torch.rand(4, LENGTH)})
    with torch.no_grad():
        loss, _ = evaluate_objective(DPO(0.3, "ipo"), model, given)
        found = model(given.tokens, lambda h, head: head.log_probabilities(h, given.labels))
    real = given.labels != IGNORED
    means = ((found - given.numbers[REFERENCE]) * real).sum(1) / real.sum(1)
    want = (means[0::2] - means[1::2] - 1 / 0.6).square().mean()
    torch.testing.assert_close(loss, want)


def test_dpo_with_the_likelihood_of_the_chosen():
    """Per token of the answer that is preferred, here the second of the first pair."""
    model = training(DPO()).model
    side = torch.tensor([-1.0, -1.0, 1.0, 1.0])[:, None].expand(4, LENGTH)
    given = replace(GIVEN, numbers={REFERENCE: torch.rand(4, LENGTH), SIDE: side})
    with torch.no_grad():
        alone, metrics = evaluate_objective(DPO(0.3), model, given)
        loss, same = evaluate_objective(DPO(0.3, rpo_alpha=0.7), model, given)
        found = model(given.tokens, lambda h, head: head.log_probabilities(h, given.labels))
    means = found.sum(1) / (given.labels != IGNORED).sum(1)
    torch.testing.assert_close(loss - alone, -0.7 * (means[1] + means[2]) / 2)
    assert same == metrics


def test_a_prompt_does_not_count():
    """Whatever numbers come with it."""
    model = training(DPO()).model
    noise = torch.where(GIVEN.labels == IGNORED, torch.rand(4, LENGTH), 0.0)
    given = replace(GIVEN, numbers={REFERENCE: noise})
    assert evaluate_objective(DPO(), model, given) == evaluate_objective(DPO(), model, GIVEN)


@pytest.fixture(params=["llama", "gpt2"])
def scalar(request, tmp_path):
    """A reward model of transformers, and the same here; the rewards of its tokens."""
    kind, fields = LLAMA if request.param == "llama" else GPT2
    made = stored(kind, fields, 2, tmp_path)
    made.config.num_labels = 1
    made.config._attn_implementation = "eager"
    with Wide():
        theirs = transformers.AutoModelForSequenceClassification.from_config(
            made.config, dtype=torch.float64
        )
    theirs = theirs.double().eval()
    theirs.base_model.load_state_dict(made.base_model.state_dict())
    source = open_source(tmp_path)
    ours = Decoder(replace(source.spec, head=ScalarHeadSpec())).double()
    load(ours, source)
    with torch.no_grad():
        theirs.score.weight.copy_(torch.randn(theirs.score.weight.shape))
        ours.score.weight.copy_(theirs.score.weight)
    yield theirs, ours, source


def test_rewards_of_pairs(scalar):
    """The number of the last token that is no padding is what transformers takes of a sequence."""
    theirs, ours, source = scalar
    given = batch()
    with Wide():
        rewards = theirs(input_ids=given.tokens, use_cache=False).logits[:, 0]
    loss, metrics = evaluate_objective(PairwiseRewardLoss(), ours, given)
    margins = torch.stack([rewards[0] - rewards[1], rewards[2] - rewards[3]])
    want = torch.log(1 + torch.exp(-margins)).mean()
    torch.testing.assert_close(loss, want, rtol=TOLERANCE, atol=0)
    loss.backward()
    want.backward()
    compare(ours, source, theirs)
    torch.testing.assert_close(ours.score.weight.grad, theirs.score.weight.grad, rtol=0, atol=1e-12)
    assert metrics["accuracy"] == (margins > 0).double().mean()


def test_values_of_tokens(scalar):
    theirs, ours, source = scalar
    given = batch()
    given = replace(given, weights=torch.rand(4, LENGTH, dtype=torch.float64))
    with Wide():
        hidden = theirs.base_model(input_ids=given.tokens, use_cache=False).last_hidden_state
    values = theirs.score(hidden)[..., 0]
    schedule = make_schedule("1f1b", 1, 4)
    found = forward.values(ours, given, SINGLE, schedule)
    torch.testing.assert_close(found, values.detach(), rtol=0, atol=1e-12)
    loss, _ = evaluate_objective(SquaredError(), ours, given)
    weights = given.weights * (given.labels != IGNORED)
    want = (weights * (values - given.numbers[TARGET]).square()).sum() / 2 / weights.sum()
    torch.testing.assert_close(loss, want, rtol=TOLERANCE, atol=0)
    loss.backward()
    want.backward()
    compare(ours, source, theirs)
    torch.testing.assert_close(ours.score.weight.grad, theirs.score.weight.grad, rtol=0, atol=1e-12)


def test_weights_of_tokens(tmp_path):
    """The mean by weights; of weight 0 or IGNORED, a token is none."""
    theirs, ours, source = theirs_and_ours(*LLAMA, 0, tmp_path)
    given = batch()
    weights = torch.rand(4, LENGTH, dtype=torch.float64)
    weights[0, 4], weights[3, 3] = 0, 3.5
    loss, _ = evaluate_objective(CrossEntropy(), ours, replace(given, weights=weights))
    weights = weights * (given.labels != IGNORED)
    want = -(weights * texts(theirs, given)).sum() / weights.sum()
    torch.testing.assert_close(loss, want, rtol=TOLERANCE, atol=0)
    loss.backward()
    want.backward()
    compare(ours, source, theirs)


SMALL = Flat(
    vocab_size=61,
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=8,
)


def training(objective, micros: int = 1, head: ScalarHeadSpec | None = None) -> TrainState:
    schedule = make_schedule("1f1b", 1, micros)
    config = SMALL if head is None else Tiny(replace(SMALL.spec, head=head))
    model = build(config, SINGLE, schedule=schedule)
    initialize(model, 0)
    settings = OptimizerConfig()
    optimizer = adamw(model, settings)
    return TrainState(model, optimizer, settings, 9, 0, schedule, objective=objective)


GIVEN = replace(batch(), numbers={REFERENCE: torch.zeros(4, LENGTH)})
# objective, microbatches, what the batch has otherwise, what is said
REFUSED = {
    "no reference": (DPO(), 2, {"numbers": {}}, r"numbers\['reference'\]"),
    "half a pair": (DPO(), 4, {}, "1 sequences are not divisible into pairs"),
    "nothing to judge": (
        DPO(),
        1,
        {"labels": torch.where(torch.arange(4)[:, None] == 2, IGNORED, GIVEN.labels)},
        "sequence 2 of a batch of pairs has no completion",
    ),
    "no weight": (
        CrossEntropy(),
        2,
        {"weights": torch.zeros(4, LENGTH)},
        "no token of the global batch has a loss",
    ),
    "a negative weight": (
        CrossEntropy(),
        2,
        {"weights": torch.full((4, LENGTH), -1.0)},
        "finite and not negative",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_judged_changes_nothing(case):
    objective, micros, otherwise, said = REFUSED[case]
    train = training(objective, micros)
    before = [p.detach().clone() for p in train.model.parameters()]
    with pytest.raises(ValueError, match=said):
        optimizer_step(train, replace(GIVEN, **otherwise), SINGLE)
    assert all(map(torch.equal, before, train.model.parameters()))


def test_targets_are_asked_for():
    with pytest.raises(ValueError, match=r"numbers\['target'\]"):
        SquaredError().count(replace(batch(), numbers={}))


def test_an_objective_is_for_a_head():
    """Of logits, or of numbers."""
    check(PairwiseRewardLoss(), replace(SMALL.spec, head=ScalarHeadSpec()))
    with pytest.raises(ValueError, match="PairwiseRewardLoss.* needs .* Scalar.* has LMHead"):
        training(PairwiseRewardLoss())
    with pytest.raises(ValueError, match="DPO.* needs .* LMHead.* has Scalar"):
        check(DPO(), replace(SMALL.spec, head=ScalarHeadSpec()))


def test_what_is_asked_is_what_a_model_has():
    """Nobody takes the loss of a reward model, or the value of a policy's token."""
    schedule = make_schedule("1f1b", 1, 1)
    policy, rewards = (
        Decoder(replace(SMALL.spec, head=head)) for head in (SMALL.spec.head, ScalarHeadSpec())
    )
    with pytest.raises(ValueError, match="a value needs .* Scalar.* has LMHead"):
        forward.values(policy, batch(), SINGLE, schedule)
    with pytest.raises(ValueError, match="a log-probability needs .* LMHead.* has Scalar"):
        forward.log_probabilities(rewards, batch(), SINGLE, schedule)
    with pytest.raises(ValueError, match="CrossEntropy.* needs .* LMHead.* has Scalar"):
        mean_loss(rewards, [batch()], SINGLE)


def test_a_step_tells_what_its_objective_does():
    """In the metrics of the step, and of the run."""
    metrics = optimizer_step(training(DPO(), 2), GIVEN, SINGLE)
    assert metrics.objective.keys() == {*DPO().names}
    assert metrics.tokens == GIVEN.real_tokens
    assert optimizer_step(training(CrossEntropy(), 2), GIVEN, SINGLE).objective == {}


def test_no_accuracy_while_only_rounding_decides_it():
    """The policy is the reference until its first update: its rewards are equal but for rounding,
    which no layout shares.
    """
    state = training(DPO(from_reference=True), 2)
    first, second = (optimizer_step(state, GIVEN, SINGLE).objective for _ in range(2))
    assert first.keys() == {*DPO().names} - {"rewards/accuracies"} and second.keys() == {
        *DPO().names
    }
    kto = KTO(from_reference=True)
    assert meaningful_metrics(kto, 0) == ("margin",)
    assert meaningful_metrics(kto, 1) == kto.names
    for objective in (DPO(), PairwiseRewardLoss()):
        assert meaningful_metrics(objective, 0) == objective.names


def packed(side: bool) -> Batch:
    """Two pairs in two rows and a third in two more, which lie the other way round."""
    labels = torch.tensor(
        [[1, 2, -1, 3, -1], [-1, 4, 1, 2, -1], [1, 1, 1, 1, 1], [2, -1, -1, 3, -1]]
    )
    starts = torch.tensor([[0, 0, 2, 2, 4], [0, 0, 2, 2, 2], [0, 0, 0, 0, 0], [0, 0, 0, 0, 4]])
    sides = torch.tensor([[1.0], [-1.0], [-1.0], [1.0]]).expand(4, 5)
    return Batch(
        labels.clamp(min=0),
        torch.where(labels < 0, IGNORED, labels),
        Documents.from_starts(starts),
        numbers={SIDE: sides} if side else {},
    )


def test_answers_of_packed_rows():
    """Where each ends, and which is compared with which."""
    given = packed(side=True)
    found = pairs.PairIndex(given)
    assert found.last[:, :3].tolist() == [[1, 3, -1], [1, 3, -1], [4, -1, -1], [3, -1, -1]]
    assert found.lengths[:, :2].tolist() == [[2, 1], [1, 2], [5, 0], [2, 0]]
    assert found.is_last.nonzero().tolist() == [[0, 1], [0, 3], [1, 1], [1, 3], [2, 4], [3, 3]]
    assert pairs.count_pairs(given) == 3 and found.real.sum() == 3
    chosen, rejected = found.pair_up(found.lengths)
    assert chosen[found.real].tolist() == [2, 1, 2] and rejected[found.real].tolist() == [1, 2, 5]
    unsaid = pairs.PairIndex(packed(side=False))
    assert unsaid.pair_up(unsaid.lengths).chosen[found.real].tolist() == [2, 1, 5]


def test_packed_rewards_are_those_of_each_alone():
    """Documents see nothing of one another, and a margin is of its own pair."""
    model = training(PairwiseRewardLoss(), head=ScalarHeadSpec()).model.double()
    given = packed(side=True)
    margin = torch.tensor([[0.5, 0.5, 2.0, 2.0, 0.0], [0, 0, 0, 0, 0], [0] * 5, [1.0] * 5]).double()
    given = replace(given, numbers={**given.numbers, MARGIN: margin}).add_positions(1)
    loss, metrics = evaluate_objective(PairwiseRewardLoss(0.1, margin=0.25), model, given)
    places = ((0, 0, 2), (0, 2, 4), (1, 0, 2), (1, 2, 4), (2, 0, 5), (3, 0, 4))
    with torch.no_grad():
        found = [
            model(given.tokens[row : row + 1, a:b], lambda h, head: head.values(h))[0, -1]
            for row, a, b in places
        ]
    pairs_ = [(found[0], found[2], 0.5), (found[1], found[3], 2.0), (found[5], found[4], 1.0)]
    want = [
        torch.log(1 + torch.exp(-(c - r - m - 0.25))) + 0.1 * (c + r) ** 2 for c, r, m in pairs_
    ]
    torch.testing.assert_close(loss.detach(), torch.stack(want).mean(), rtol=1e-12, atol=0)
    assert metrics["accuracy"] == pytest.approx(sum(c > r for c, r, _ in pairs_) / 3)


def test_kto_of_packed_rows():
    """Each row's zero is the mean of its answers to other prompts, which lie in either row."""
    model = training(DPO()).model
    given = packed(side=True).add_positions(1)
    side = torch.tensor([[1, 1, 0, 0, 0], [0, 0, -1, -1, -1], [0] * 5, [-1] * 5]).float()
    noise = torch.rand(4, 5, generator=torch.Generator().manual_seed(0))
    given = replace(given, numbers={SIDE: side, REFERENCE: -4 - noise})
    loss, metrics = evaluate_objective(KTO(0.7, 1.5, 0.5), model, given)
    with torch.no_grad():
        found = model(
            given.tokens,
            lambda h, head: head.log_probabilities(h, given.labels),
            documents=given.documents,
            positions=given.positions,
        )
    ratios = (found - given.numbers[REFERENCE]) * (given.labels != IGNORED)

    def sum_of(row: int, first: int, end: int) -> float:
        return float(ratios[row, first:end].sum())

    # answers, whether each is wanted, and the answer to another prompt beside it
    rows = [
        [(sum_of(0, 0, 2), True, sum_of(1, 0, 2)), (sum_of(1, 2, 5), False, sum_of(0, 2, 4))],
        [(sum_of(3, 0, 4), False, sum_of(2, 0, 5))],
    ]
    losses, margins = [], []
    for row in rows:
        zero = max(0.0, sum(other for _, _, other in row) / len(row))
        for own, good, _ in row:
            ahead = 0.7 * (own - zero if good else zero - own)
            losses.append((1.5 if good else 0.5) * (1 - 1 / (1 + math.exp(-ahead))))
            margins.append(ahead)
    assert float(loss.detach()) == pytest.approx(sum(losses) / 3, rel=1e-5)
    assert metrics["margin"] == pytest.approx(sum(margins) / 3, rel=1e-4)


def test_how_sure_a_reward_model_is():
    """Pairs by sigmoid(|difference|), and how many are right: as counted one by one."""
    model = training(PairwiseRewardLoss(), head=ScalarHeadSpec()).model
    with torch.no_grad():
        model.score.weight.mul_(200)
    given = packed(side=True).add_positions(1)
    _, metrics = evaluate_objective(CalibratedRewardLoss(), model, given)
    with torch.no_grad():
        values = model(
            given.tokens,
            lambda h, head: head.values(h),
            documents=given.documents,
            positions=given.positions,
        )
    ends = [(0, 1, 1, 1), (0, 3, 1, 3), (3, 3, 2, 4)]
    sure, right = [0] * 10, [0] * 10
    for a, i, b, j in ends:
        ahead = float(values[a, i] - values[b, j])
        at = min(9, int(10 * (2 / (1 + math.exp(-abs(ahead))) - 1)))
        sure[at] += 1
        right[at] += ahead > 0
    assert [round(3 * metrics[f"sure {i}"]) for i in range(10)] == sure
    assert [round(3 * metrics[f"right {i}"]) for i in range(10)] == right
