"""Matrix factorisation (Koren, Bell and Volinsky, "Matrix Factorization Techniques for Recommender Systems", 2009): a
rating is a mean, what is particular to user and item, and the product of their vectors.

All that is learnt but the mean lies in tables; on parameter servers a row takes memory once somebody has rated.
"""

import torch
from torch import nn

from verbund import Table

USERS, ITEMS, RANK = 20_000, 5_000, 8


class Factors(nn.Module):
    def __init__(self):
        super().__init__()
        self.users, self.items = Table(USERS, RANK, scale=0.3, seed=1), Table(ITEMS, RANK, scale=0.3, seed=2)
        self.user_bias, self.item_bias = Table(USERS, 1, scale=0.0), Table(ITEMS, 1, scale=0.0)
        self.mean = nn.Parameter(torch.tensor(3.5))

    def forward(self, user, item):
        particular = (self.user_bias(user) + self.item_bias(item)).squeeze(-1)
        return self.mean + particular + (self.users(user) * self.items(item)).sum(-1)


def model():
    return Factors()


def inputs(batch):
    return batch["user"].long(), batch["item"].long()


def rows(batch):
    """What each table will be asked for: on parameter servers one request brings all of it."""
    user, item = batch["user"].long(), batch["item"].long()
    return {"users": user, "user_bias": user, "items": item, "item_bias": item}
