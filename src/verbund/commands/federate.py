"""The group `verbund federate`: parse, call, answer."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, TextIO

import typer

from verbund.answer import Answer
from verbund.checkpoint import durable
from verbund.comm.wire import Certificates, Pinned
from verbund.commands.options import AsJson, Debug, JobFile, Quiet, Settings, Workers, changes_of
from verbund.errors import InputError
from verbund.job import Job

app = typer.Typer(
    name="federate",
    help="Train one model at several owners; no data leaves its owner.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Federation = Annotated[
    Path,
    typer.Option("--federation", metavar="DIR", help="The server's identity and those of its clients."),
]
Authority = Annotated[
    Path | None,
    typer.Option("--authority", metavar="FILE", help="In place of enrolment: who signs all certificates (PEM)."),
]
Certificate = Annotated[
    Path | None, typer.Option("--certificate", metavar="FILE", help="With --authority: the own one.")
]
Key = Annotated[Path | None, typer.Option("--key", metavar="FILE", help="With --authority: its private key.")]

_TOKEN_BYTES = 256
"""At most so long is a token."""


@app.command(
    epilog="Example: `verbund federate server job.toml --listen 0.0.0.0:4711 --run runs/federated`; the same command "
    "goes on after it was stopped or killed."
)
def server(
    job: JobFile,
    listen: Annotated[str, typer.Option("--listen", metavar="HOST:PORT", help="Where clients reach it.")],
    settings: Settings = None,
    federation: Federation = Path("federation"),
    run: Annotated[
        Path | None,
        typer.Option("--run", metavar="DIR", help="The run's directory; one that was begun is gone on with."),
    ] = None,
    authority: Authority = None,
    certificate: Certificate = None,
    key: Key = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> Answer:
    """Hold a job's rounds with clients that dial in."""
    from verbund.stage.federated.serve import serve

    whole = Job.read(job, changes_of(settings, None, None, None))
    done = serve(whole, listen, federation, _certificates(authority, certificate, key), run, quiet=quiet)
    return Answer(done.summary, done.headline())


@app.command(
    epilog="Example: `verbund federate client --server 10.0.0.1:4711 --data patients.parquet --policy policy.toml "
    "--token token.txt`; the same command, then without a token, goes on after it was stopped or killed."
)
def client(
    address: Annotated[str, typer.Option("--server", metavar="HOST:PORT", help="The server to dial.")],
    data: Annotated[str, typer.Option("--data", metavar="SOURCE", help="The own samples; they stay here.")],
    policy: Annotated[
        Path | None, typer.Option("--policy", metavar="FILE", help="What is permitted; without it no task is.")
    ] = None,
    home: Annotated[
        Path, typer.Option("--home", metavar="DIR", help="The client's identity, and what is under way.")
    ] = Path("federated-client"),
    token: Annotated[
        Path | None,
        typer.Option("--token", metavar="FILE", help="Enrolment token, the first time; - reads standard input."),
    ] = None,
    workers: Workers = None,
    patience: Annotated[
        float, typer.Option("--patience", metavar="SECONDS", help="How long to try to reach the server.")
    ] = 600.0,
    authority: Authority = None,
    certificate: Certificate = None,
    key: Key = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> Answer:
    """Take part in a server's rounds with data that stay here."""
    from verbund.exchange.federated.enrolment import Token
    from verbund.exchange.federated.policy import Policy
    from verbund.stage.federated.client import take_part
    from verbund.stage.federated.home import Home
    from verbund.stage.federated.line import Line, enrol

    permitted = Policy.read(policy)
    place = Home(home)
    credentials: Certificates | Pinned | None = _certificates(authority, certificate, key)
    if credentials is None:
        known = place.pinned()
        if token is not None and known is None:
            text = sys.stdin.read(4096) if str(token) == "-" else _read(token)
            enrol(address, Token.parse(text, "--token"), place, patience)
            known = place.pinned()
        elif token is not None and known is not None and token.is_file():  # it was used, if it is this client's
            given = Token.parse(_read(token), "--token")
            if (given.fingerprint, given.name) != known:
                what = f"this client is enrolled as `{known[1]}`, and the token is for `{given.name}` or another server"
                raise InputError(what, where=str(home), fix="Give each client a `--home` of its own")
        if known is None:
            fix = "Give the token that `verbund federate enroll` at the server has written: `--token FILE`"
            raise InputError("this client is not enrolled anywhere yet", where=str(home), fix=fix)
        credentials = Pinned(known[0], place.identity)
    line = Line(address, credentials, patience)
    try:
        taken = take_part(line, place, data, permitted, workers or 1, quiet=quiet)
    finally:
        line.close()
    told = {
        "status": "done" if taken.model else "stopped",
        "rounds": taken.rounds,
        "model": str(taken.model) if taken.model else None,
    }
    ended = "done" if taken.model else "the server stopped before the last round, and the same command goes on"
    lines = [f"{ended}: updates counted in {taken.rounds} rounds"]
    return Answer({**told, "home": str(taken.home)}, [*lines, *([f"model: {taken.model}"] if taken.model else [])])


@app.command(epilog="Example: `verbund federate enroll --name north --label region=north --out north.token`")
def enroll(
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="Of the client.")],
    federation: Federation = Path("federation"),
    label: Annotated[
        list[str] | None, typer.Option("--label", metavar="KEY=VALUE", help="What rounds select by; may be repeated.")
    ] = None,
    hours: Annotated[float, typer.Option("--hours", metavar="N", help="How long the token is good.")] = 72.0,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="A new file for the token; default: print it.")
    ] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Forget the client instead.")] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> Answer:
    """Make a one-time token by which a client becomes known under a name."""
    from verbund.exchange.federated.enrolment import Enrolment

    folder = Enrolment(federation)
    if remove:
        folder.remove(name)
        return Answer({"status": "done", "removed": name}, [f"{name} is known no more"])
    labels = dict(_label(text) for text in label or [])
    former = folder.invited(name)
    if out is None:
        token = str(folder.invite(name, labels, hours * 3600.0))
        return Answer({"status": "done", "name": name, "token": token}, [token], [token])
    with _new(out) as file:  # first: a token that nobody gets must not make an earlier one void
        file.write(f"{folder.invite(name, labels, hours * 3600.0)}\n")
    void = f"; the token that {name} had before is void" if former else ""
    line = f"{out}: give it to {name}, and to nobody else{void}"
    return Answer({"status": "done", "name": name, "file": str(out)}, [line])


@app.command(epilog="Example: `verbund federate identity --home north/home --name north`")
def identity(
    home: Annotated[
        Path, typer.Option("--home", metavar="DIR", help="The client's identity; made if there is none.")
    ] = Path("federated-client"),
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="Of the client, before it is enrolled.")
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> Answer:
    """Print a client's public key, for the policies (`[peers]`) of the other owners."""
    from verbund.exchange.federated.secure import pinned
    from verbund.stage.federated.home import Home

    place = Home(home)
    known = place.pinned()
    called = name or (known[1] if known else None)
    if called is None:
        raise InputError("this client has no name yet", where=str(home), fix="Give it: `--name NAME`")
    key = pinned(place.identity.certificate).hex()
    line = f'{json.dumps(called)} = "{key}"'
    return Answer({"status": "done", "name": called, "key": key}, [line], [line])


@app.command(
    epilog="Example: `verbund federate audit runs/federated/federated/audit.jsonl --told federated-client/audit.jsonl`"
)
def audit(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="An audit log.")],
    told: Annotated[
        list[Path] | None,
        typer.Option(
            "--told", metavar="FILE", help="A client's log: FILE must have what it was told; may be repeated."
        ),
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> Answer:
    """Check that nothing in an audit log was changed, left out or put in."""
    from verbund.exchange.federated.audit import heads_told, verify, verify_keys

    head = verify(file)
    heads = [noted for path in told or [] for noted in heads_told(path, head.log)]
    verify(file, heads)
    keys = sum(verify_keys(file, path) for path in told or [])
    against = f", and the {len(heads)} heads that clients were told" if told else ""
    against += f" and {keys} public keys that they were shown" if keys else ""
    line = f"{file}: {head.count} lines, each follows on the one before{against}; head {head.hash}"
    return Answer({"status": "done", "lines": head.count, "head": head.hash, "heads": len(heads)}, [line])


def _certificates(authority: Path | None, certificate: Path | None, key: Path | None) -> Certificates | None:
    if authority is None and certificate is None and key is None:
        return None
    if authority is None or certificate is None or key is None:
        raise InputError("--authority, --certificate and --key go together", where="arguments", fix="Give all three")
    return Certificates(authority, certificate, key)


def _label(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise InputError(f"`{text}` is no label", where="--label", fix="A label is KEY=VALUE, such as region=north")
    return key, value


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot be read: {error}", where=str(path)) from None


@contextmanager
def _new(path: Path) -> Iterator[TextIO]:
    """A new file that only this user reads, with room for a token; nothing of it is left after an error."""
    try:
        file = open(path, "x", encoding="ascii", opener=lambda name, flags: os.open(name, flags, 0o600))  # noqa: SIM115
    except OSError as error:
        fix = "Choose another one" if isinstance(error, FileExistsError) else None
        raise InputError(f"cannot be written: {error.strerror}", where=str(path), fix=fix) from None
    try:
        with file:
            try:
                os.posix_fallocate(file.fileno(), 0, _TOKEN_BYTES)
                yield file
                file.flush()
                file.truncate()
            except OSError as error:
                raise InputError(durable.reason(error), where=str(path), fix=durable.remedy(error)) from None
    except BaseException:
        path.unlink(missing_ok=True)
        raise
