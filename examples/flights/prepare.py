"""Makes a training and a validation set of flights: python prepare.py [--source flights-3m.parquet] [--rows 300000]

The source are 3,000,000 US flights of the first half of 2001 (US Department of Transportation, public domain) as the
npm package vega-datasets ships them; without --source its archive is fetched from the npm registry and checked. January
to May are trained on, June is validated on: a model must do well on days that it has not seen anything of.
"""

import argparse
import base64
import hashlib
import io
import sys
import tarfile
import urllib.request
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

URL = "https://registry.npmjs.org/vega-datasets/-/vega-datasets-3.2.1.tgz"
SHA512 = "lTSwZA6yq6qSU2YZm+6bqILiIvTPPxn4itir7jPGFmHIdPvUfQ9pCzzcrklYywMJgLUbaIeSkZQdiJd6wBxPug=="
MEMBER = "package/data/flights-3m.parquet"
LARGEST_ARCHIVE, LARGEST_FILE = 200_000_000, 100_000_000
AIRPORTS = 256  # room for them: a pair of airports is 256 · origin + destination
LATE = 15  # minutes
VALIDATED_MONTH = 6
HERE = Path(__file__).parent


def fetch() -> bytes:
    """The file out of the package's archive, if the archive is the one it should be."""
    print(f"fetching {URL}", file=sys.stderr)
    with urllib.request.urlopen(URL, timeout=60) as answer:
        archive = answer.read(LARGEST_ARCHIVE + 1)
    if len(archive) > LARGEST_ARCHIVE:
        sys.exit(f"{URL} has more than {LARGEST_ARCHIVE} bytes, which is not the archive that was expected")
    if hashlib.sha512(archive).digest() != base64.b64decode(SHA512):
        sys.exit(f"{URL} is not the archive that was expected: its SHA-512 differs. Try again, or give --source")
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as files:
        member = files.getmember(MEMBER)
        content = files.extractfile(member)
        if content is None or member.size > LARGEST_FILE:
            sys.exit(f"{MEMBER} in {URL} is no file of at most {LARGEST_FILE} bytes")
        return content.read()


def columns(flights: pa.Table, airports: pa.Array) -> pa.Table:
    """What a model gets of each flight."""
    origin, destination = (pc.index_in(flights[name], value_set=airports) for name in ("origin", "destination"))
    date = flights["date"]
    return pa.table(
        {
            "origin": pc.cast(origin, pa.int32()),
            "destination": pc.cast(destination, pa.int32()),
            "pair": pc.cast(pc.add(pc.multiply(origin, AIRPORTS), destination), pa.int32()),
            "hour": pc.cast(pc.hour(date), pa.int32()),
            "weekday": pc.cast(pc.day_of_week(date), pa.int32()),
            "month": pc.cast(pc.month(date), pa.int32()),
            "distance": pc.cast(flights["distance"], pa.float32()),
            "late": pc.cast(pc.greater(flights["delay"], LATE), pa.uint8()),
        }
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, help="flights-3m.parquet, if it is here already")
    parser.add_argument("--out", type=Path, default=HERE / "data", help="folder (default: data beside this file)")
    parser.add_argument("--rows", type=int, help="take so many flights, chosen by a seeded draw, and not all")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if options.source is not None and not options.source.is_file():
        sys.exit(f"--source: no such file: {options.source}")
    flights = pq.read_table(options.source if options.source is not None else io.BytesIO(fetch()))
    # June 30's last flights are filed under the first minute of July.
    flights = flights.filter(pc.less_equal(pc.month(flights["date"]), VALIDATED_MONTH))
    names = {*pc.unique(flights["origin"]).to_pylist(), *pc.unique(flights["destination"]).to_pylist()}
    if len(names) > AIRPORTS:
        sys.exit(f"there are {len(names)} airports, and room for {AIRPORTS}")
    if options.rows is not None and options.rows < len(flights):
        chosen = np.random.default_rng(options.seed).choice(len(flights), options.rows, replace=False)
        flights = flights.take(np.sort(chosen))
    table = columns(flights, pa.array(sorted(names), flights["origin"].type))
    late = pc.equal(table["month"], VALIDATED_MONTH)
    options.out.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", table.filter(pc.invert(late))), ("validation", table.filter(late))):
        path = options.out / f"{name}.parquet"
        pq.write_table(part, path)
        share = pc.mean(part["late"]).as_py() or 0.0
        print(f"{path}: {len(part):,} flights, {100 * share:.1f} % of them late")


if __name__ == "__main__":
    main()
