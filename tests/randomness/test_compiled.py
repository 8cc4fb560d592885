"""Numbers keyed by the sample in a compiled model: those of the same model as it is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from verbund.randomness.sample import SampleRandomness


class Functional(nn.Module):
    """Draws by functions, in a part of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.3, self.training) + 0.1 * torch.rand_like(x)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(4, 6, num_layers=2, dropout=0.5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x.view(-1, 3, 4))[0][:, -1]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "a dropout module": lambda: nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 5)),
    "functions": lambda: nn.Sequential(nn.Sequential(nn.Linear(12, 16), Functional()), nn.Linear(16, 5)),
    "a recurrent module": Recurrent,
    "no draws": lambda: nn.Linear(12, 5),
}


@pytest.mark.parametrize("noisy_loss", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_a_compiled_model_draws_what_the_plain_one_does(name: str, noisy_loss: bool) -> None:
    torch.manual_seed(0)
    plain = MODELS[name]()
    compiled = copy.deepcopy(plain)
    data = torch.randn(8, 12)
    torch._dynamo.reset()
    steps = [passes(model, noisy_loss, data, compile) for model, compile in ((plain, False), (compiled, True))]
    for step, (one, other) in enumerate(zip(*steps, strict=True)):
        assert len(one) > 1
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(a, b, msg=lambda text, step=step: f"step {step}: {text}")


def passes(model: nn.Module, noisy_loss: bool, data: Tensor, compile: bool) -> list[list[Tensor]]:
    """The loss and all gradients of some steps, more than the compiler would make versions for."""
    randomness = SampleRandomness(model, seed=3)
    call: Any = torch.compile(model, backend="aot_eager") if compile else model
    steps = []
    for step in range(10):
        size = 8 if step % 3 else 5
        ids = torch.arange(size) + 8 * step
        model.zero_grad()
        with randomness.active(step, ids):
            output = call(data[:size])
            if noisy_loss:
                output = output + torch.rand(size, 1)
        loss = output.square().sum()
        loss.backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        steps.append([loss.detach(), *(g.clone() for g in gradients if g is not None)])
    return steps
