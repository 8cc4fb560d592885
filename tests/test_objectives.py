"""The objectives against torch's own functions, and what they say to shapes and targets that do not fit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from verbund import objectives
from verbund.errors import DataError, InputError, TaskError
from verbund.job import Objective
from verbund.sums import Sums


def mean(sums: Sums) -> Tensor:
    return sums.total.sum() / sums.weight.sum()


def loss(name: str, **settings: Any) -> objectives.Loss:
    return objectives.build(Objective(name=name, **settings))  # type: ignore[arg-type]


def gradient(function: Any, output: Tensor) -> Tensor:
    leaf = output.detach().clone().requires_grad_()
    function(leaf).backward()
    assert leaf.grad is not None
    return leaf.grad


@settings(max_examples=60, deadline=None)
@given(
    samples=st.integers(1, 7),
    classes=st.integers(2, 6),
    inner=st.lists(st.integers(1, 3), max_size=2),
    smoothing=st.sampled_from([0.0, 0.1, 0.7]),
    weighted=st.booleans(),
    ignore=st.sampled_from([-100, 0, 255]),
    seed=st.integers(0, 2**31),
)
def test_cross_entropy_is_torchs(
    samples: int, classes: int, inner: list[int], smoothing: float, weighted: bool, ignore: int, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    output = torch.randn(samples, classes, *inner, generator=random, dtype=torch.float64)
    targets = torch.randint(0, classes, (samples, *inner), generator=random)
    targets[torch.rand(targets.shape, generator=random) < 0.3] = ignore
    targets.view(-1)[0] = 1
    weights = [0.5 + 0.25 * c for c in range(classes)] if weighted else None

    def reference(output: Tensor) -> Tensor:
        tensor = torch.tensor(weights, dtype=torch.float64) if weights else None
        return F.cross_entropy(output, targets, tensor, ignore_index=ignore, label_smoothing=smoothing)

    ours = loss("cross_entropy", label_smoothing=smoothing, class_weights=weights, ignore_index=ignore)
    sums = ours(output, targets)
    assert sums.total.shape == sums.weight.shape == (samples,)
    torch.testing.assert_close(mean(sums), reference(output))
    torch.testing.assert_close(gradient(lambda o: mean(ours(o, targets)), output), gradient(reference, output))


@pytest.mark.parametrize("inner", [(), (4,)])
@pytest.mark.parametrize("weights", [None, [1.0, 2.0, 3.0]])
def test_class_probabilities_are_torchs(inner: tuple[int, ...], weights: list[float] | None) -> None:
    output = torch.randn(5, 3, *inner)
    targets = torch.rand(5, 3, *inner).softmax(1)
    sums = loss("cross_entropy", label_smoothing=0.2, class_weights=weights)(output, targets)
    tensor = torch.tensor(weights) if weights else None
    torch.testing.assert_close(mean(sums), F.cross_entropy(output, targets, tensor, label_smoothing=0.2))


@pytest.mark.parametrize("name", ["binary_cross_entropy", "mean_squared_error"])
@pytest.mark.parametrize("shape", [(6,), (6, 1), (6, 3), (6, 2, 3)])
def test_elementwise_objectives_are_torchs(name: str, shape: tuple[int, ...]) -> None:
    output, targets = torch.randn(shape), torch.rand(shape)
    reference = F.binary_cross_entropy_with_logits if name == "binary_cross_entropy" else F.mse_loss
    sums = loss(name)(output, targets)
    assert sums.total.shape == sums.weight.shape == (6,)
    torch.testing.assert_close(mean(sums), reference(output, targets))
    torch.testing.assert_close(
        gradient(lambda o: mean(loss(name)(o, targets)), output),
        gradient(lambda o: reference(o, targets), output),
    )


@pytest.mark.parametrize("name", ["binary_cross_entropy", "mean_squared_error"])
@pytest.mark.parametrize(("output_shape", "target_shape"), [((6, 1), (6,)), ((6,), (6, 1))])
def test_a_column_and_a_vector_are_not_broadcast(
    name: str, output_shape: tuple[int, ...], target_shape: tuple[int, ...]
) -> None:
    output, targets = torch.randn(output_shape), torch.randint(0, 2, target_shape)
    sums = loss(name)(output, targets)
    flat = loss(name)(output.flatten(), targets.flatten().float())
    assert sums.total.shape == (6,)
    torch.testing.assert_close(sums.total, flat.total)


def test_sums_add_up_over_unequal_parts() -> None:
    output, targets = torch.randn(11, 4, 3), torch.randint(0, 4, (11, 3))
    targets[torch.rand(11, 3) < 0.4] = -100
    targets[0, 0] = 2
    ours = loss("cross_entropy", class_weights=[1.0, 2.0, 0.5, 3.0])
    parts = [ours(output[a:b], targets[a:b]) for a, b in ((0, 1), (1, 8), (8, 11))]
    total = sum(part.total.sum() for part in parts)
    weight = sum(part.weight.sum() for part in parts)
    reference = F.cross_entropy(output, targets, torch.tensor([1.0, 2.0, 0.5, 3.0]))
    torch.testing.assert_close(total / weight, reference)


@pytest.mark.parametrize("wrap", [lambda t: t, lambda t: {"logits": t}, lambda t: SimpleNamespace(logits=t)])
def test_next_token_counts_tokens(wrap: Any) -> None:
    output, tokens = torch.randn(3, 5, 11), torch.randint(0, 11, (3, 5))
    tokens[0, 2:] = -100
    tokens[2] = -100
    sums = loss("next_token")(wrap(output), tokens)
    assert sums.weight.tolist() == [2.0, 5.0, 0.0]
    assert sums.total[2] == 0
    torch.testing.assert_close(mean(sums), F.cross_entropy(output.transpose(1, 2), tokens))


def test_reduced_precision_is_summed_in_float32() -> None:
    output, targets = torch.randn(4, 3), torch.tensor([0, 1, 2, 0], dtype=torch.uint8)
    sums = loss("cross_entropy")(output.bfloat16(), targets)
    assert sums.total.dtype == torch.float32
    torch.testing.assert_close(mean(sums), F.cross_entropy(output.bfloat16().float(), targets.long()))


def test_class_weights_first_used_in_validation_serve_training() -> None:
    ours = loss("cross_entropy", class_weights=[1.0, 2.0])
    output, targets = torch.randn(4, 2), torch.tensor([0, 1, 1, 0])
    with torch.inference_mode():
        ours(output, targets)
    leaf = output.clone().requires_grad_()
    mean(ours(leaf, targets)).backward()
    assert leaf.grad is not None


@pytest.mark.parametrize(
    ("name", "output", "targets"),
    [
        ("cross_entropy", (4, 3), (5,)),
        ("cross_entropy", (4, 3, 2), (4, 3)),
        ("cross_entropy", (4,), (4,)),
        ("binary_cross_entropy", (4, 2), (4,)),
        ("mean_squared_error", (4, 1), (1, 4)),
        ("mean_squared_error", (4,), (4, 4)),
        ("next_token", (4, 3), (4,)),
        ("next_token", (4, 3, 7), (4, 2)),
    ],
)
def test_shapes_that_do_not_fit_are_named(name: str, output: tuple[int, ...], targets: tuple[int, ...]) -> None:
    with pytest.raises(TaskError) as caught:
        loss(name)(torch.zeros(output), torch.zeros(targets, dtype=torch.int64))
    text = str(caught.value)
    assert str(list(output)) in text
    assert str(list(targets)) in text
    assert "Expected: output" in text


def test_other_misuse_is_explained() -> None:
    with pytest.raises(TaskError, match="no integers"):
        loss("cross_entropy")(torch.zeros(4, 3), torch.zeros(4))
    with pytest.raises(TaskError, match="no tokens"):
        loss("next_token")(torch.zeros(4, 3, 2), torch.zeros(4, 3))
    with pytest.raises(TaskError, match="returned a `tuple`"):
        loss("cross_entropy")((torch.zeros(4, 3),), torch.zeros(4))
    with pytest.raises(TaskError, match="with a list"):
        loss("mean_squared_error")(torch.zeros(4), [0.0])
    with pytest.raises(InputError, match="2 class weights for 3 classes"):
        loss("cross_entropy", class_weights=[1.0, 2.0])(torch.zeros(4, 3), torch.zeros(4).long())
    with pytest.raises(InputError, match="label smoothing"):
        loss("mean_squared_error", label_smoothing=0.1)
    with pytest.raises(InputError, match="not negative"):
        loss("cross_entropy", class_weights=[1.0, -1.0])
    with pytest.raises(DataError, match="between -1 and 1"):
        loss("binary_cross_entropy")(torch.zeros(2), torch.tensor([-1, 1]))
    with pytest.raises(DataError, match="nan"):
        loss("binary_cross_entropy")(torch.zeros(2), torch.tensor([0.0, float("nan")]))


@pytest.mark.parametrize(
    ("name", "targets", "output", "expected"),
    [
        (
            "cross_entropy",
            [0, -100, 3, 9],
            (4, 3),
            "sample 12 is 3; the model has 3 outputs, classes 0 to 2; -100 is ignored",
        ),
        ("cross_entropy", [0, -1, 1, 2], (4, 3), "sample 11 is -1"),
        ("cross_entropy", [0, 1, 2, -100], (4, 3), None),
        ("cross_entropy", [0, 7, 2, -2], None, "sample 13 is -2"),
        ("next_token", [[0, 1], [2, 8], [0, 0], [0, 0]], (4, 2, 8), "sample 11 is 8"),
        ("mean_squared_error", [0.0, 1.0, float("nan"), 2.0], (4,), "sample 12 is nan; a finite number"),
        ("mean_squared_error", [0.0, 1.0, -5.0, 2.0], (4,), None),
        ("binary_cross_entropy", [0.0, 1.0, 2.0, 0.5], (4,), "sample 12 is 2.0; a value from 0 to 1"),
    ],
)
def test_the_first_bad_target_is_found_with_its_sample(
    name: str, targets: list[Any], output: tuple[int, ...] | None, expected: str | None
) -> None:
    message = objectives.check_targets(
        Objective(name=name),  # type: ignore[arg-type]
        torch.tensor(targets),
        None if output is None else torch.zeros(output),
        torch.tensor([10, 11, 12, 13]),
    )
    if expected is None:
        assert message is None
    else:
        assert message is not None
        assert expected in message


@pytest.mark.parametrize("name", ["cross_entropy", "binary_cross_entropy", "mean_squared_error", "next_token"])
def test_default_metrics_fit_their_objective(name: str) -> None:
    assert objectives.default_metrics(Objective(name=name))  # type: ignore[arg-type]
    assert objectives.default_metrics(None) == []
