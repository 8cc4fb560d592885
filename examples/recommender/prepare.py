"""Makes ratings to learn from: python prepare.py [--ratings 2000000]

Each user and each item has a hidden vector and a bias; a rating is the mean, both biases, the product of the vectors,
and noise. Users are active and items popular by Zipf's law: the most popular item has 8,500 ratings, every second one
fewer than 170. No model can predict the noise, so its size is the error that remains of a perfect one.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

MEAN, BIAS, NOISE = 3.5, 0.4, 0.5
RANK = 8
HERE = Path(__file__).parent


def zipf(count: int, size: int, random: np.random.Generator) -> np.ndarray:
    """`size` numbers below `count`, that of rank r with a probability in proportion to 1 / (r + count / 100)."""
    ends = np.cumsum(1.0 / (np.arange(count) + count / 100))
    order = random.permutation(count)  # popularity says nothing of the number
    return order[np.minimum(np.searchsorted(ends / ends[-1], random.random(size)), count - 1)]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "data", help="folder (default: data beside this file)")
    parser.add_argument("--users", type=int, default=20_000)
    parser.add_argument("--items", type=int, default=5_000)
    parser.add_argument("--ratings", type=int, default=2_000_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    random = np.random.default_rng(options.seed)
    users, items = (random.normal(0, RANK**-0.25, (count, RANK)) for count in (options.users, options.items))
    user_bias, item_bias = (random.normal(0, BIAS, count) for count in (options.users, options.items))
    user, item = (zipf(count, options.ratings, random) for count in (options.users, options.items))
    noise = random.normal(0, NOISE, options.ratings)
    rating = MEAN + user_bias[user] + item_bias[item] + np.einsum("nk,nk->n", users[user], items[item]) + noise
    options.out.mkdir(parents=True, exist_ok=True)
    table = {"user": user.astype(np.int32), "item": item.astype(np.int32), "rating": rating.astype(np.float32)}
    pq.write_table(pa.table(table), options.out / "ratings.parquet")
    print(json.dumps({"rmse_of_the_noise": float(noise.std()), "rmse_of_the_mean": float(rating.std())}))


if __name__ == "__main__":
    main()
