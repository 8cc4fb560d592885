"""Will a flight be more than 15 minutes late? Wide and deep (Cheng et al., "Wide & Deep Learning for Recommender
Systems", 2016): a linear part over all categories, pairs of airports too, beside a network over their embeddings.

All of its tables can lie on parameter servers: workers hold but the rows that a batch names.
"""

import torch
from torch import nn

from verbund import Table

AIRPORTS, HOURS, WEEKDAYS = 256, 24, 7
SIZES = {"origin": AIRPORTS, "destination": AIRPORTS, "pair": AIRPORTS**2, "hour": HOURS, "weekday": WEEKDAYS}
DEEP = {"origin": 24, "destination": 24, "pair": 8, "hour": 12, "weekday": 6}


class WideAndDeep(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide = nn.ModuleDict({name: Table(size, 1, scale=0.0) for name, size in SIZES.items()})
        self.deep = nn.ModuleDict(
            {name: Table(SIZES[name], width, seed=seed) for seed, (name, width) in enumerate(DEEP.items())}
        )
        self.distance = nn.Linear(1, 1)
        self.layers = nn.Sequential(
            nn.Linear(sum(DEEP.values()) + 1, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 1)
        )

    def forward(self, categories, distance):
        linear = sum(table(categories[name]) for name, table in self.wide.items()) + self.distance(distance)
        embedded = [table(categories[name]) for name, table in self.deep.items()]
        return (linear + self.layers(torch.cat([*embedded, distance], dim=1))).squeeze(1)


def model():
    return WideAndDeep()


def inputs(batch):
    distance = batch["distance"].to(torch.float32).unsqueeze(1).log() - 6.3
    return {"categories": {name: batch[name].long() for name in SIZES}, "distance": distance}


def rows(batch):
    """What each table will be asked for: on parameter servers one request brings all of it."""
    return {f"{part}.{name}": batch[name].long() for part in ("wide", "deep") for name in SIZES}
