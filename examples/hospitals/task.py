"""A small network that tells benign from malignant tumours by 30 measures of cell nuclei."""

import torch
from torch import nn

# Public, rough means of the measures, so that every owner scales alike without looking at anybody's data.
MEANS = "14 19 92 655 0.096 0.104 0.089 0.049 0.181 0.063 0.41 1.2 2.9 40 0.007 0.025 0.032 0.012 0.021 0.004"
WORST = "16 26 107 880 0.13 0.25 0.27 0.11 0.29 0.084"
SCALE = torch.tensor([float(number) for number in f"{MEANS} {WORST}".split()])


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", SCALE.clone(), persistent=False)

    def forward(self, x):
        return (x / self.scale - 1.0) * 3.0


def model():
    return nn.Sequential(Scaled(), nn.Linear(30, 16), nn.Tanh(), nn.Linear(16, 2))
