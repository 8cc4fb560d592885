"""Metrics against scikit-learn, torchmetrics and plain float64, and their merging over any assignment to
workers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import sklearn.metrics as sk
import torch
import torchmetrics.functional as tm
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from verbund import objectives
from verbund.errors import InputError, RunFailed, TaskError
from verbund.job import Objective
from verbund.metrics import NAMES, Evaluator, build
from verbund.sums import Sums


def goal(name: str, **settings: Any) -> Objective:
    return Objective(name=name, **settings)  # type: ignore[arg-type]


def evaluate(
    objective: Objective, names: Sequence[str], output: Tensor, targets: Tensor, size: int = 1_000_000
) -> dict[str, Any]:
    """The metrics of `output` and `targets` in batches of `size`, by one worker."""
    evaluator = Evaluator(build(names, objective), objective)
    loss = objectives.build(objective)
    starts = range(0, len(targets), size)
    for index, start in enumerate(starts):
        part = slice(start, start + size)
        ids = np.arange(len(targets))[part]
        evaluator.add(index, output[part], targets[part], loss(output[part], targets[part]), ids)
    return evaluator.merge([evaluator.state()], batches=len(starts), samples=len(targets))


@pytest.fixture
def multiclass() -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(3)
    targets = torch.randint(0, 5, (203,), generator=random)
    targets[targets == 4] = 1  # a class that never is a target
    output = torch.randn(203, 6, generator=random) + 2 * torch.nn.functional.one_hot(targets, 6)
    output[:, 5] = -50  # and one that neither is a target nor predicted
    return output, targets


def test_classification_is_scikit_learns(multiclass: tuple[Tensor, Tensor]) -> None:
    output, targets = multiclass
    names = ["accuracy", "precision", "recall", "f1", "confusion_matrix", "top_1", "top_3", "perplexity"]
    ours = evaluate(goal("cross_entropy"), names, output, targets, size=17)
    truth, found = targets.numpy(), output.argmax(1).numpy()
    assert ours["accuracy"] == ours["top_1"] == sk.accuracy_score(truth, found)
    for name, reference in (
        ("precision", sk.precision_score),
        ("recall", sk.recall_score),
        ("f1", sk.f1_score),
    ):
        macro = reference(truth, found, average="macro", zero_division=0)
        assert ours[name] == pytest.approx(macro, rel=1e-12)
        each = reference(truth, found, average=None, labels=range(6), zero_division=0)
        assert ours[f"{name}_per_class"] == pytest.approx(each, rel=1e-12)
    assert ours["confusion_matrix"] == sk.confusion_matrix(truth, found, labels=range(6)).tolist()
    assert ours["top_3"] == pytest.approx(sk.top_k_accuracy_score(truth, output.numpy(), k=3, labels=range(6)))
    loss = sk.log_loss(truth, output.double().softmax(1).numpy(), labels=range(6))
    assert ours["loss"] == pytest.approx(loss, rel=1e-6)
    assert ours["perplexity"] == pytest.approx(np.exp(loss), rel=1e-6)
    json.dumps(ours)


def test_roc_auc_is_scikit_learns(multiclass: tuple[Tensor, Tensor]) -> None:
    output, targets = multiclass
    ours = evaluate(goal("cross_entropy"), ["roc_auc"], output, targets, size=17)
    scores = output.log_softmax(1).numpy()
    each = [sk.roc_auc_score((targets == c).numpy(), scores[:, c]) for c in range(4)]
    assert ours["roc_auc_per_class"][:4] == pytest.approx(each, rel=1e-12)
    assert np.isnan(ours["roc_auc_per_class"][4:]).all()
    assert ours["roc_auc"] == pytest.approx(np.mean(each), rel=1e-12)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(-3, 3), st.booleans()), min_size=1, max_size=40))
def test_binary_roc_auc_with_ties(pairs: list[tuple[int, bool]]) -> None:
    output = torch.tensor([score for score, _ in pairs], dtype=torch.float32)
    targets = torch.tensor([label for _, label in pairs])
    ours = evaluate(goal("binary_cross_entropy"), ["roc_auc"], output, targets, size=7)["roc_auc"]
    if targets.all() or not targets.any():
        assert np.isnan(ours)
    else:
        assert ours == pytest.approx(sk.roc_auc_score(targets.numpy(), output.numpy()), rel=1e-12)


@pytest.mark.parametrize("column", [False, True])
def test_binary_is_scikit_learns(column: bool) -> None:
    output = torch.randn(101, 1, generator=torch.Generator().manual_seed(1))
    targets = (output + torch.randn(101, 1, generator=torch.Generator().manual_seed(2))).squeeze(1) > 0.3
    names = ["accuracy", "precision", "recall", "f1", "confusion_matrix"]
    labels = targets.long()
    shaped = output if column else output.squeeze(1)
    ours = evaluate(goal("binary_cross_entropy"), names, shaped, labels, size=10)
    truth, found = labels.numpy(), (output.squeeze(1) > 0).numpy()
    assert ours["accuracy"] == sk.accuracy_score(truth, found)
    assert ours["precision"] == pytest.approx(sk.precision_score(truth, found), rel=1e-12)
    assert ours["recall"] == pytest.approx(sk.recall_score(truth, found), rel=1e-12)
    assert ours["f1"] == pytest.approx(sk.f1_score(truth, found), rel=1e-12)
    assert ours["f1_per_class"] == pytest.approx(sk.f1_score(truth, found, average=None), rel=1e-12)
    assert ours["confusion_matrix"] == sk.confusion_matrix(truth, found).tolist()


def test_several_labels_are_scikit_learns() -> None:
    output = torch.randn(80, 4, generator=torch.Generator().manual_seed(1))
    targets = torch.randint(0, 2, (80, 4), generator=torch.Generator().manual_seed(2))
    names = ["accuracy", "precision", "f1", "confusion_matrix", "roc_auc"]
    ours = evaluate(goal("binary_cross_entropy"), names, output, targets, size=9)
    truth, found = targets.numpy(), (output > 0).numpy()
    assert ours["accuracy"] == pytest.approx((truth == found).mean(), rel=1e-12)
    assert ours["precision"] == pytest.approx(sk.precision_score(truth, found, average="macro"), rel=1e-12)
    assert ours["f1"] == pytest.approx(sk.f1_score(truth, found, average="macro"), rel=1e-12)
    assert ours["confusion_matrix"] == sk.multilabel_confusion_matrix(truth, found).tolist()
    assert ours["roc_auc"] == pytest.approx(sk.roc_auc_score(truth, output.numpy(), average="macro"))


@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("offset", [0.0, 1e6])
def test_regression_is_scikit_learns(outputs: int, offset: float) -> None:
    random = torch.Generator().manual_seed(5)
    targets = torch.randn(97, outputs, generator=random, dtype=torch.float64) + offset
    output = targets + 0.3 * torch.randn(97, outputs, generator=random, dtype=torch.float64)
    ours = evaluate(goal("mean_squared_error"), ["mae", "rmse", "r2"], output, targets, size=8)
    truth, found = targets.numpy(), output.numpy()
    assert ours["mae"] == pytest.approx(sk.mean_absolute_error(truth, found), rel=1e-12)
    assert ours["rmse"] == pytest.approx(np.sqrt(sk.mean_squared_error(truth, found)), rel=1e-12)
    assert ours["r2"] == pytest.approx(sk.r2_score(truth, found), rel=1e-9)
    assert ours["loss"] == pytest.approx(sk.mean_squared_error(truth, found), rel=1e-12)


def test_r2_where_it_is_degenerate() -> None:
    same = torch.full((4,), 3.0)
    assert evaluate(goal("mean_squared_error"), ["r2"], same, same, size=2)["r2"] == 1.0
    assert evaluate(goal("mean_squared_error"), ["r2"], same + 1, same, size=2)["r2"] == 0.0
    assert np.isnan(evaluate(goal("mean_squared_error"), ["r2"], same[:1], same[:1])["r2"])


def test_sequences_leave_ignored_tokens_out() -> None:
    random = torch.Generator().manual_seed(7)
    output, tokens = torch.randn(12, 6, 9, generator=random), torch.randint(0, 9, (12, 6), generator=random)
    tokens[torch.rand(12, 6, generator=random) < 0.4] = -100
    tokens[3] = -100
    ours = evaluate(goal("next_token"), ["accuracy", "top_2", "perplexity"], output, tokens, size=5)
    kept = tokens != -100
    assert ours["accuracy"] == pytest.approx((output.argmax(2) == tokens)[kept].double().mean().item(), rel=1e-12)
    reference = tm.text.perplexity(output, tokens, ignore_index=-100)
    assert ours["perplexity"] == pytest.approx(reference.item(), rel=1e-5)
    top = (output.topk(2).indices == tokens[..., None]).any(2)[kept].double().mean().item()
    assert ours["top_2"] == pytest.approx(top, rel=1e-12)


def test_positions_of_images_are_read_as_cross_entropy_reads_them() -> None:
    random = torch.Generator().manual_seed(7)
    output = torch.randn(6, 3, 4, 5, generator=random)
    targets = torch.randint(0, 3, (6, 4, 5), generator=random)
    targets[0, :2] = 255
    names = ["accuracy", "f1", "roc_auc", "perplexity"]
    ours = evaluate(goal("cross_entropy", ignore_index=255), names, output, targets, size=4)
    kept = targets != 255
    truth, found = targets[kept].numpy(), output.argmax(1)[kept].numpy()
    assert ours["accuracy"] == sk.accuracy_score(truth, found)
    assert ours["f1"] == pytest.approx(sk.f1_score(truth, found, average="macro"), rel=1e-12)
    scores = output.movedim(1, -1)[kept].log_softmax(1).numpy()
    areas = [sk.roc_auc_score(truth == c, scores[:, c]) for c in range(3)]
    assert ours["roc_auc"] == pytest.approx(np.mean(areas), rel=1e-12)


def test_perplexity_knows_no_smoothing_or_weights(multiclass: tuple[Tensor, Tensor]) -> None:
    output, targets = multiclass
    plain = evaluate(goal("cross_entropy"), ["perplexity"], output, targets)
    for settings_ in ({"label_smoothing": 0.1}, {"class_weights": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]}):
        other = evaluate(goal("cross_entropy", **settings_), ["perplexity"], output, targets)
        assert other["loss"] != pytest.approx(plain["loss"])
        assert other["perplexity"] == pytest.approx(plain["perplexity"], rel=1e-6)


def test_equal_scores_favour_the_lowest_class() -> None:
    output, targets = torch.zeros(3, 4), torch.tensor([0, 1, 3])
    ours = evaluate(goal("cross_entropy"), ["accuracy", "top_1", "top_2"], output, targets)
    assert (ours["accuracy"], ours["top_1"], ours["top_2"]) == (1 / 3, 1 / 3, 2 / 3)
    lost = evaluate(goal("cross_entropy"), ["top_1"], torch.full((3, 4), float("nan")), targets)
    assert lost["top_1"] == 0.0


def test_padding_counts_nowhere() -> None:
    objective = goal("cross_entropy")
    names = ["accuracy", "precision", "confusion_matrix", "roc_auc", "top_2", "perplexity"]
    output, targets = torch.randn(6, 3), torch.tensor([0, 1, 2, 0, 1, 2])
    whole = evaluate(objective, names, output, targets)
    sums = objectives.build(objective)(output, targets)
    mask = torch.tensor([1.0] * 6 + [0.0] * 2)
    padded = Sums(torch.cat([sums.total, torch.zeros(2)]), mask)
    evaluator = Evaluator(build(names, objective), objective)
    more = torch.cat([output, torch.randn(2, 3)]), torch.cat([targets, torch.tensor([0, 0])])
    evaluator.add(0, *more, padded, [0, 1, 2, 3, 4, 5, -1, -1])
    assert evaluator.merge([evaluator.state()], batches=1, samples=6) == whole

    values = goal("mean_squared_error")
    evaluator = Evaluator(build(["mae", "rmse", "r2"], values), values)
    evaluator.add(0, torch.tensor([1.0, 2.0, 9.0]), torch.tensor([1.0, 4.0, 0.0]), Sums(mask[5:], mask[5:]), [0, 1, 2])
    only = evaluate(values, ["mae", "rmse", "r2"], torch.tensor([1.0]), torch.tensor([1.0]))
    merged = evaluator.merge([evaluator.state()], batches=1, samples=3)
    assert merged["mae"] == only["mae"] == 0.0


CASES: dict[str, tuple[list[str], tuple[int, ...], tuple[int, ...], int]] = {
    "cross_entropy": (
        ["accuracy", "top_2", "precision", "recall", "f1", "confusion_matrix", "roc_auc", "perplexity"],
        (4,),
        (),
        4,
    ),
    "binary_cross_entropy": (["accuracy", "f1", "confusion_matrix", "roc_auc"], (), (), 2),
    "mean_squared_error": (["mae", "rmse", "r2"], (2,), (2,), 100),
    "next_token": (["accuracy", "top_3", "perplexity"], (3, 5), (3,), 5),
}


@settings(max_examples=40, deadline=None)
@given(data=st.data(), name=st.sampled_from(sorted(CASES)), samples=st.integers(1, 30), size=st.integers(1, 6))
def test_any_assignment_to_workers_gives_the_same_bits(data: st.DataObject, name: str, samples: int, size: int) -> None:
    names, inner, target_inner, top = CASES[name]
    objective = goal(name)
    random = torch.Generator().manual_seed(samples * 10 + size)
    output = torch.randn(samples, *inner, generator=random)
    targets = torch.randint(0, top, (samples, *target_inner), generator=random)
    loss = objectives.build(objective)

    def own(output: Tensor) -> dict[str, Sums]:
        spread = output.reshape(len(output), -1).double().std(1, correction=0)
        return {"spread": Sums(spread, torch.ones(len(output)))}

    def run(assignment: list[int], order: list[int], workers: int) -> dict[str, Any]:
        parts = [Evaluator(build(names, objective), objective) for _ in range(workers)]
        for batch in order:
            part = slice(batch * size, (batch + 1) * size)
            out, wanted = output[part], targets[part]
            ids = torch.arange(samples)[part]
            parts[assignment[batch]].add(batch, out, wanted, loss(out, wanted), ids, own(out))
        return parts[0].merge([part.state() for part in parts], batches=len(assignment), samples=samples)

    batches = -(-samples // size)
    alone = run([0] * batches, list(range(batches)), 1)
    workers = data.draw(st.integers(1, 5))
    assignment = data.draw(st.lists(st.integers(0, workers - 1), min_size=batches, max_size=batches))
    order = data.draw(st.permutations(range(batches)))
    assert {"loss", "spread"} <= alone.keys()
    assert repr(run(assignment, order, workers)) == repr(alone)  # repr tells every bit, and NaN equals NaN


def test_every_batch_is_needed_exactly_once() -> None:
    objective = goal("mean_squared_error")

    def worker(*batches: int) -> Evaluator:
        evaluator = Evaluator(build([], objective), objective)
        for batch in batches:
            ones = torch.ones(2)
            evaluator.add(batch, ones, ones, Sums(ones, ones), [2 * batch, 2 * batch + 1])
        return evaluator

    first, second = worker(0, 2), worker(1)
    states = [first.state(), second.state()]
    assert first.merge(states, batches=3, samples=6) == {"loss": 1.0}
    with pytest.raises(RunFailed, match="batch 3 was not evaluated \\(1 of 4"):
        first.merge(states, batches=4, samples=8)
    with pytest.raises(RunFailed, match="batch 1 was evaluated twice"):
        first.merge([*states, worker(1).state()], batches=3, samples=6)
    with pytest.raises(RunFailed, match="only 2"):
        first.merge(states, batches=2, samples=6)
    with pytest.raises(RunFailed, match="6 samples were evaluated, but there are 5"):
        first.merge(states, batches=3, samples=5)
    first.reset()
    assert np.isnan(first.merge([first.state()], batches=0, samples=0)["loss"])  # type: ignore[arg-type]


def test_no_batch_at_all_gives_nan() -> None:
    for name, (names, _, _, _) in CASES.items():
        objective = goal(name)
        evaluator = Evaluator(build(names, objective), objective)
        values = evaluator.merge([evaluator.state()] * 2, batches=0, samples=0)
        assert values.keys() >= {"loss", *names}
        assert all(value == [] or np.isnan(value) for value in values.values())  # type: ignore[arg-type]


def test_memory_of_counts_does_not_grow_with_batches() -> None:
    objective = goal("cross_entropy")
    evaluator = Evaluator(build(["accuracy", "confusion_matrix"], objective), objective)
    output, targets = torch.randn(4, 50), torch.randint(0, 50, (4,))
    sums = objectives.build(objective)(output, targets)
    for batch in range(200):
        evaluator.add(batch, output, targets, sums, [0, 1, 2, 3])
    state = evaluator.state()
    assert state["counts.confusion_matrix"].shape == (2500,)
    assert state["counts.confusion_matrix"].sum() == 800
    assert sum(array.nbytes for array in state.values()) < 2500 * 8 + 200 * 40


def test_states_hold_types_that_travel() -> None:
    for name, (names, inner, target_inner, top) in CASES.items():
        objective = goal(name)
        evaluator = Evaluator(build(names, objective), objective)
        output, targets = torch.randn(5, *inner), torch.randint(0, top, (5, *target_inner))
        evaluator.add(0, output, targets, objectives.build(objective)(output, targets), range(5))
        assert {str(array.dtype) for array in evaluator.state().values()} <= {
            "int8",
            "int32",
            "int64",
            "float32",
            "float64",
        }


def test_a_loss_of_the_users_own_may_have_metrics_by_name() -> None:
    output, targets = torch.randn(9, 3), torch.randint(0, 3, (9,))
    evaluator = Evaluator(build(["accuracy", "f1", "perplexity"], None), None)
    evaluator.add(0, output, targets, Sums(torch.rand(9), torch.ones(9)), range(9))
    ours = evaluator.merge([evaluator.state()], batches=1, samples=9)
    assert ours["accuracy"] == sk.accuracy_score(targets, output.argmax(1))
    likelihood = torch.nn.functional.cross_entropy(output, targets).item()
    assert ours["perplexity"] == pytest.approx(np.exp(likelihood), rel=1e-6)


def test_names_are_checked() -> None:
    objective = goal("cross_entropy")
    assert [metric.name for metric in build(["loss", "top_5", "top_5"], objective)] == ["loss", "top_5"]
    with pytest.raises(InputError, match=r"`acuracy` is no metric\. Did you mean `accuracy`"):
        build(["acuracy"], objective)
    with pytest.raises(InputError, match=r"e\.g\. `top_5`"):
        build(["top_K"], objective)
    with pytest.raises(InputError, match="at least 1"):
        build(["top_0"], objective)
    with pytest.raises(InputError, match=r"does not fit the objective `mean_squared_error`.*mae, rmse, r2"):
        build(["accuracy"], goal("mean_squared_error"))
    for name in NAMES:
        assert build([name.replace("K", "2")], None)
    with pytest.raises(InputError, match="K is at most 3"):
        evaluate(objective, ["top_4"], torch.zeros(2, 3), torch.tensor([0, 1]))


@pytest.mark.parametrize("name", sorted(CASES))
def test_default_metrics_can_be_built(name: str) -> None:
    names = objectives.default_metrics(goal(name))
    assert [metric.name for metric in build(names, goal(name))] == ["loss", *names]


def test_what_a_task_returns_is_checked() -> None:
    objective = goal("cross_entropy")
    output, targets = torch.randn(3, 2), torch.tensor([0, 1, 0])
    sums = objectives.build(objective)(output, targets)
    evaluator = Evaluator(build(["accuracy"], objective), objective)
    with pytest.raises(TaskError, match="`loss` is not a `Sums`"):
        evaluator.add(0, output, targets, Sums(sums.total.sum(), sums.weight.sum()), range(3))
    with pytest.raises(TaskError, match="`mine` is not a `Sums`"):
        evaluator.add(0, output, targets, sums, range(3), {"mine": torch.zeros(3)})  # type: ignore[dict-item]
    with pytest.raises(TaskError, match="`accuracy`, which is a metric of the job"):
        evaluator.add(0, output, targets, sums, range(3), {"accuracy": sums})
    evaluator.add(0, output, targets, sums, range(3), {"mine": sums})
    with pytest.raises(TaskError, match=r"\[mine\] for one batch and \[other\]"):
        evaluator.add(1, output, targets, sums, range(3), {"other": sums})
    with pytest.raises(TaskError, match="can compare an output"):
        evaluator.add(1, output, targets.float(), sums, range(3), {"mine": sums})
    values = evaluator.merge([evaluator.state()], batches=1, samples=3)
    assert values["mine"] == values["loss"]
