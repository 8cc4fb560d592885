"""DP-SGD: gradients of single samples, clipped one by one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from verbund.errors import InputError
from verbund.exchange.federated.privacy import Event, ExamplePrivacy
from verbund.exchange.federated.privacy.examples import check_model, clipped_sum, sample_gradients
from verbund.job import Privacy

pytestmark = pytest.mark.usefixtures("one_thread")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.GroupNorm(1, 3), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 6 * 6, 5), nn.LayerNorm(5)
    ).double()


def parts() -> tuple[nn.Module, dict[str, Tensor], Tensor, Tensor]:
    model = network()
    images = torch.randn(11, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return model, {n: p.detach() for n, p in model.named_parameters()}, images, torch.arange(11) % 5


def loss_of(model: nn.Module):  # type: ignore[no-untyped-def]
    def loss(parameters: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        output = functional_call(model, parameters, (image[None],))
        return nn.functional.cross_entropy(output, label[None])

    return loss


def one_by_one(model: nn.Module, images: Tensor, labels: Tensor) -> list[dict[str, Tensor]]:
    found = []
    for i in range(len(images)):
        model.zero_grad()
        nn.functional.cross_entropy(model(images[i : i + 1]), labels[i : i + 1]).backward()
        found.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    return found


@pytest.mark.parametrize("at_once", [None, 4])
def test_gradients_are_those_of_each_sample_alone(at_once: int | None) -> None:
    model, parameters, images, labels = parts()
    together = sample_gradients(loss_of(model), parameters, (images, labels), at_once)
    for i, alone in enumerate(one_by_one(model, images, labels)):
        for name, gradient in alone.items():
            torch.testing.assert_close(together[name][i], gradient, rtol=1e-10, atol=1e-12)


def test_each_sample_is_clipped_by_itself() -> None:
    model, parameters, images, labels = parts()
    singles = one_by_one(model, images, labels)
    norms = [torch.cat([g.flatten() for g in single.values()]).norm() for single in singles]
    bound = float(torch.stack(norms).median())
    total, found = clipped_sum(sample_gradients(loss_of(model), parameters, (images, labels)), bound)
    torch.testing.assert_close(found, torch.stack(norms))
    for name in total:
        expected = sum(s[name] * min(1.0, bound / float(n)) for s, n in zip(singles, norms, strict=True))
        torch.testing.assert_close(total[name], expected)
    _, once = clipped_sum({n: p[None] for n, p in total.items()}, bound)
    assert float(once) <= 11 * bound


def test_a_sample_without_a_finite_gradient_contributes_nothing() -> None:
    total, _ = clipped_sum({"w": torch.tensor([[1.0, 0.0], [float("nan"), 1.0], [0.0, float("inf")]])}, 5.0)
    assert total["w"].tolist() == [1.0, 0.0]


def test_a_step_is_the_clipped_sum_with_noise_over_the_mean_batch() -> None:
    model, parameters, images, labels = parts()
    quiet = ExamplePrivacy(Privacy(kind="examples", noise=1e-9, clip=0.1), samples=22, rate=0.5)
    found = quiet.gradients(loss_of(model), parameters, (images, labels), 0, at_once=3)
    total, _ = clipped_sum(sample_gradients(loss_of(model), parameters, (images, labels)), 0.1)
    for name in total:
        torch.testing.assert_close(found[name], total[name] / 11, atol=1e-9, rtol=1e-6)
    loud = ExamplePrivacy(Privacy(kind="examples", noise=2.0, clip=0.1), samples=22, rate=0.5)
    none = loud.gradients(lambda p, x: (p["w"] * x).sum(), {"w": torch.zeros(90_000)}, (torch.zeros(0, 1),), 0)
    assert float(none["w"].std()) == pytest.approx(2.0 * 0.1 / 11, rel=0.02), "an empty batch is noise alone"
    assert loud.event == Event(noise=2.0, rate=0.5)


def test_batches_are_poissons() -> None:
    privacy = ExamplePrivacy(Privacy(kind="examples"), samples=400, rate=0.05, seed=1)
    batches = [privacy.batch(step) for step in range(400)]
    sizes = torch.tensor([len(b) for b in batches], dtype=torch.float64)
    assert float(sizes.mean()) == pytest.approx(20.0, abs=0.7)
    assert float(sizes.var()) == pytest.approx(19.0, rel=0.3), "a batch of fixed size would have none"
    times = torch.bincount(torch.cat(batches), minlength=400).double()
    assert float(times.var()) == pytest.approx(19.0, rel=0.3), "each sample is drawn by itself"
    assert torch.equal(privacy.batch(3), batches[3])
    fresh = ExamplePrivacy(Privacy(kind="examples"), samples=400, rate=0.5)
    assert not torch.equal(fresh.batch(0), fresh.batch(0))


def test_a_layer_that_mixes_samples_is_refused() -> None:
    check_model(network())
    with pytest.raises(InputError, match=r"the layer `1` \(BatchNorm1d\) mixes the samples"):
        check_model(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    with pytest.raises(InputError, match="must be between 1 and"):
        ExamplePrivacy(Privacy(kind="examples"), samples=10, rate=1.5)
