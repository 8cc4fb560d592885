"""Secure rounds between a server and clients over the wire: who drops out when, who cheats how, and what is on disk.

The clients' updates are the same number everywhere, so that each sum is known.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from conftest import MakeJob, wait_for
from held import Direct, Held, Hold, holding, written
from verbund.comm.wire.bits import Bits
from verbund.errors import InputError, Interrupted, VerbundError
from verbund.exchange.federated.policy import Policy
from verbund.exchange.federated.round import Phase
from verbund.exchange.federated.secure import Identity, Sent, keys
from verbund.exchange.federated.secure.exchanges import Exchanges
from verbund.exchange.federated.update import Update
from verbund.mesh.axes import Mesh
from verbund.stage.federated import line, secure_part
from verbund.stage.federated.conversation import Conversation
from verbund.stage.federated.files import SHARED, TOLD, unpacked
from verbund.stage.federated.home import Home
from verbund.stage.federated.island import Training
from verbund.stage.federated.secure_part import SecurePart
from verbund.stage.federated.serve import terms_of
from verbund.stage.federated.server import Server

pytestmark = pytest.mark.usefixtures("one_thread")

NAMES = ("east", "north", "south", "west")
SIZES = {"east": 0.11, "north": -0.23, "south": 0.31, "west": 0.47}
STEPS = ("advertise", "shares", "masked", "consent", "reveal")
UNIFORM = {"name": "fedavg", "weights": "uniform"}
STEP = 1.0 / (2**19 - 1)
QUICK = {"quorum": 1, "lost_after": 0.3, "gather": 20.0, "step_deadline": 20.0, "attempts": 3}


class Constant:
    """What trains: everything moves by one number."""

    compression = None

    def __init__(self, shared: Mapping[str, torch.Tensor], size: float, samples: float) -> None:
        self._shared, self.size, self._samples = shared, size, samples
        self.side = SimpleNamespace(personal=[])

    def shared(self) -> dict[str, torch.Tensor]:
        return dict(self._shared)

    def train(self, assignment: Any, positions: Any, memory: Any) -> tuple[Update, dict[str, torch.Tensor]]:
        change = {name: torch.full_like(values, self.size) for name, values in self._shared.items()}
        return Update(change, self._samples, assignment.version, 3, {}, {"loss": (5.0, 7.0)}), {}


class Owner:
    """A client in a thread."""

    def __init__(self, held: Held, name: str, size: float, samples: float = 1.0, **policy: Any) -> None:
        self.home, self.line = Home(held.folder / name), held.client(name)
        self.said: list[str] = []
        self.failure: VerbundError | None = None
        offer = self.line.join().offer
        folder = self.home.job(offer.digest)
        job = offer.job_at(folder, str(held.folder / "data.npz"), 1)
        shared, _ = unpacked(held.server.journal.versions.path(held.server.journal.current), SHARED, TOLD)
        island = SimpleNamespace(job=job, mesh=Mesh(), train_set=range(7), validation_set=None)
        self.local = Constant(shared, size, samples)
        training = Training(island, self.local, folder / "content")  # type: ignore[arg-type]
        permitted = Policy(**{"tasks": ["*"], **policy})
        self.conversation = Conversation(self.line, self.home, folder, name, permitted, job, self.said.append)
        self.conversation.begin(Direct(training.do))  # type: ignore[arg-type]
        self.conversation.end_processes = lambda: None  # type: ignore[method-assign]
        self._stop = False
        self._thread = threading.Thread(target=self._work, daemon=True)

    @property
    def part(self) -> SecurePart:
        assert self.conversation._secure is not None
        return self.conversation._secure

    def start(self) -> Owner:
        self._thread.start()
        return self

    def join(self) -> None:
        self._thread.join(30.0)
        assert not self._thread.is_alive()

    def vanish(self) -> None:
        """Ends without a word, from its own thread."""
        self.line.close()
        raise Interrupted("it is gone")

    def noted(self, event: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in written(self.home.folder / "audit.jsonl")]
        return [line for line in lines if line["event"] == event]

    def _work(self) -> None:
        try:
            self.conversation.hold(lambda: self._stop)
        except VerbundError as error:
            self.failure = error
        finally:
            self.line.close()


def change_of(held: Held, before: str, after: str) -> torch.Tensor:
    """By how much all parameters have changed, one number each."""
    versions = held.server.journal.versions
    (old, _), (new, _) = (unpacked(versions.path(digest), SHARED, TOLD) for digest in (before, after))
    return torch.cat([(new[name].double() - old[name].double()).reshape(-1) for name in sorted(old)])


@pytest.fixture
def hold(tmp_path: Path, make_job: MakeJob) -> Iterator[Hold]:
    with holding(tmp_path, make_job) as start:

        def secure(rounds: int = 1, **exchange: Any) -> Held:
            settings = {"clients": 4, "rule": UNIFORM, "secure": {"bits": 20}, "round": QUICK}
            held = start(rounds, **{**settings, **exchange})
            wait_for(lambda: held.server.journal.begun, "the beginning")
            return held

        yield secure


def play(held: Held, owners: list[Owner]) -> None:
    for owner in owners:
        owner.start()
    for owner in owners:
        owner.join()


def mean_of(held: Held, first: str) -> float:
    """By what every parameter has changed alike."""
    change = change_of(held, first, held.events("stepped")[-1]["sha256"])
    mean = float(change.mean())
    assert float((change - mean).abs().max()) < 1e-6
    return mean


def test_the_model_is_that_of_a_plain_round(hold: Hold) -> None:
    held = hold(rounds=2)
    owners = [Owner(held, name, SIZES[name]) for name in NAMES]
    play(held, owners)
    assert held.server.journal.rounds.phase is Phase.DONE
    assert [owner.conversation.counted for owner in owners] == [2, 2, 2, 2]
    first, second = (event["sha256"] for event in held.events("stepped"))
    change = change_of(held, first, second)
    torch.testing.assert_close(change, torch.full_like(change, 0.165), rtol=0, atol=STEP / 2 + 1e-7)
    assert [event["clients"] for event in held.events("summed")] == [list(NAMES)] * 2
    numbers = [event["number"] for event in held.events("invited")]
    assert numbers == [1, 2]


def test_weights_are_public_whole_numbers_and_capped(hold: Hold) -> None:
    held = hold(rule="fedavg", secure={"bits": 20, "max_weight": 50})
    first = held.server.journal.current
    samples = dict(zip(NAMES, (10.0, 20.0, 49.6, 900.0), strict=True))
    play(held, [Owner(held, name, SIZES[name], samples[name]) for name in NAMES])
    weights = dict(zip(NAMES, (10, 20, 50, 50), strict=True))
    expected = sum(weights[name] * SIZES[name] for name in NAMES) / 130
    assert mean_of(held, first) == pytest.approx(expected, abs=STEP)
    assert held.events("summed")[0]["weight"] == 130


@pytest.mark.parametrize("step", STEPS)
def test_who_drops_out_when(step: str, hold: Hold, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to its vector a client is left out; after it, its update is in the sum all the same."""
    held = hold()
    first = held.server.journal.current
    owners = {name: Owner(held, name, SIZES[name]) for name in NAMES}
    lost = owners["south"]
    send = lost.part._send

    def gone(round_: int, kind: str, packed: bytes) -> str:
        if kind == step:
            lost.vanish()
        return send(round_, kind, packed)

    monkeypatch.setattr(lost.part, "_send", gone)
    for owner in owners.values():
        owner.start()
    wait_for(lambda: held.events("stepped"), "the step")
    in_it = [name for name in NAMES if name != "south" or step in ("consent", "reveal")]
    assert held.events("summed")[0]["clients"] == in_it
    expected = sum(SIZES[name] for name in in_it) / len(in_it)
    assert mean_of(held, first) == pytest.approx(expected, abs=STEP)
    for name in NAMES:
        owners[name].join()
        assert owners[name].conversation.counted == (name != "south")


def test_below_the_threshold_nothing_is_revealed_and_the_round_begins_anew(
    hold: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = hold()
    owners = {name: Owner(held, name, SIZES[name]) for name in NAMES}
    trained = []
    for owner in owners.values():
        do = owner.local.train
        monkeypatch.setattr(owner.local, "train", lambda *a, do=do: (trained.append(1), do(*a))[1])
    for name in ("south", "west"):
        send = owners[name].part._send
        once = [True]

        def fails(round_: int, kind: str, packed: bytes, send: Any = send, once: list[bool] = once) -> str:
            if kind == "masked" and once:
                once.clear()
                raise Unwilling
            return send(round_, kind, packed)

        monkeypatch.setattr(owners[name].part, "_send", fails)
    play(held, list(owners.values()))
    (abandoned,) = held.events("abandoned")
    assert "2 of 4 clients are left in secure aggregation (`masked`), 3 are needed" in abandoned["why"]
    assert not [event for event in held.events("answered") if event["number"] == 1 and event["step"] == "reveal"]
    assert [event["clients"] for event in held.events("summed")] == [list(NAMES)]
    assert len(trained) == 4, "what was trained is there for the next attempt"
    assert [owner.conversation.counted for owner in owners.values()] == [1, 1, 1, 1]


class Unwilling(VerbundError):
    def __init__(self) -> None:
        super().__init__("it does not want to")


Cheat = Callable[[Sent, str], Sent]


def _swapped_key(sent: Sent, _: str) -> Sent:
    if sent.kind != "keys":
        return sent
    public = np.array(sent.arrays["keys"])
    public[1, :32] = np.frombuffer(keys.public(keys.secret()), np.uint8)
    return Sent(sent.kind, sent.fields, {**sent.arrays, "keys": public})


def _other_survivors(sent: Sent, name: str) -> Sent:
    """What `east` has signed is another list than the one that this client was shown."""
    if sent.kind != "consents" or name != "north":
        return sent
    signatures = np.array(sent.arrays["signatures"])
    signatures[0, 5] ^= 1
    return Sent(sent.kind, {}, {**sent.arrays, "signatures": signatures})


def _without_itself(sent: Sent, name: str) -> Sent:
    if sent.kind != "survivors" or name != "north":
        return sent
    return Sent(sent.kind, {}, {"survived": Bits(np.array([1, 0, 1, 1], np.uint8), 1)})


def _other_terms(sent: Sent, _: str) -> Sent:
    return Sent(sent.kind, {**sent.fields, "terms": "0" * 64}, sent.arrays) if sent.kind == "invite" else sent


@pytest.mark.parametrize(
    ("cheat", "why"),
    [
        (_swapped_key, "that it has not signed for this round"),
        (_other_survivors, "it was shown another one"),
        (_without_itself, "does not count this client among the survivors"),
        (_other_terms, "has other terms than this client's settings"),
    ],
)
def test_a_server_that_cheats_is_refused_with_the_reason(
    cheat: Cheat, why: str, hold: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    due = Exchanges.due

    def altered(self: Exchanges, client: str) -> Sent | None:
        sent = due(self, client)
        return None if sent is None else cheat(sent, client)

    monkeypatch.setattr(Exchanges, "due", altered)
    held = hold(round={**QUICK, "attempts": 1})
    owners = [Owner(held, name, SIZES[name]) for name in NAMES]
    for owner in owners:
        owner.start()
    north = owners[1]
    wait_for(lambda: north.home.folder.joinpath("audit.jsonl").exists() and north.noted("refused"), "the refusal")
    assert why in json.dumps(north.noted("refused")[0])
    wait_for(lambda: any(why in text for text in north.said), "its owner hears of it")
    wait_for(lambda: not north.part._client, "its secrets are gone")
    wait_for(lambda: held.events("failed"), "the server hears of it")
    assert {event["reason"] for event in held.events("failed")} == {"ServerCheated"}
    assert "signed" not in held.server.journal.path.read_text(), "it learns of what kind it was, no more"
    revealed = [event for event in held.events("answered") if event["step"] == "reveal"]
    assert "north" not in {event["client"] for event in revealed}


def test_a_server_that_shows_another_key_of_a_peer_is_declined(hold: Hold, monkeypatch: pytest.MonkeyPatch) -> None:
    held = hold(rounds=2, round={**QUICK, "attempts": 1})
    owners = [Owner(held, name, SIZES[name]) for name in NAMES]
    swapped = Identity.create().public.hex()
    invited = Exchanges.invited

    def other(self: Exchanges) -> dict[str, Any]:
        found = invited.fget(self)  # type: ignore[attr-defined]
        return {**found, "keys": {**found["keys"], "east": swapped}} if self.number == 2 else found

    monkeypatch.setattr(Exchanges, "invited", property(other))
    for owner in owners:
        owner.start()
    north = owners[1]
    wait_for(lambda: any("another public key of `east`" in text for text in north.said), "the refusal")
    assert north.noted("peers")[0]["keys"].keys() == set(NAMES)
    wait_for(lambda: [e for e in held.events("failed") if e["reason"] == "policy, peers"], "the server hears of it")
    assert len(held.events("summed")) == 1, "the first round, with the keys that were pinned in it"


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        ({"peers": {"north": "0" * 64}}, "whom the policy does not name"),
        ({"minimum_neighbours": 4}, "divided among 3 others, fewer than 4"),
    ],
)
def test_a_policy_refuses_peers_and_neighbourhoods(policy: dict[str, Any], why: str, hold: Hold) -> None:
    held = hold()
    owners = [Owner(held, name, SIZES[name], **(policy if name == "north" else {})) for name in NAMES]
    play(held, owners)
    assert held.events("summed")[0]["clients"] == ["east", "south", "west"]
    assert any(why in text for text in owners[1].said)


def test_a_policy_that_knows_all_keys_takes_part(hold: Hold) -> None:
    held = hold()
    owners = [Owner(held, name, SIZES[name]) for name in NAMES]
    pem = {owner.home.folder.name: owner.home.identity.path.read_text() for owner in owners}
    peers = {name: Identity.of(text).public.hex() for name, text in pem.items()}
    owners[1].part._policy = Policy(tasks=["*"], secure_aggregation=True, peers=peers)
    play(held, owners)
    assert held.events("summed")[0]["clients"] == list(NAMES)


def test_a_client_sends_no_second_vector_in_a_round_in_which_it_has_revealed(hold: Hold) -> None:
    held = hold(round={**QUICK, "attempts": 2})
    owners = [Owner(held, name, SIZES[name]) for name in NAMES]
    state = owners[1].conversation._state
    state.reveal(held.server.journal.head.log, 1)
    play(held, owners)
    assert held.events("summed")[0]["clients"] == ["east", "south", "west"]
    assert any("the difference of two of its sums" in text for text in owners[1].said)


def test_a_client_that_was_started_again_has_dropped_out_of_what_was_under_way(
    hold: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its keys are gone; it neither makes others for that invitation nor answers with none."""
    held = hold(secure={"bits": 20, "threshold": 1.0})
    first = held.server.journal.current
    owners = {name: Owner(held, name, SIZES[name]) for name in NAMES}
    send = owners["south"].part._send

    def gone(round_: int, kind: str, packed: bytes) -> str:
        if kind == "shares":
            owners["south"].vanish()
        return send(round_, kind, packed)

    monkeypatch.setattr(owners["south"].part, "_send", gone)
    for owner in owners.values():
        owner.start()
    owners["south"].join()
    again = Owner(held, "south", SIZES["south"]).start()
    for owner in (again, *(owners[name] for name in NAMES if name != "south")):
        owner.join()
    assert [event["attempt"] for event in held.events("abandoned")] == [1]
    assert mean_of(held, first) == pytest.approx(0.165, abs=STEP)
    assert again.conversation.counted == 1


def test_what_is_out_of_range_is_an_error_of_that_client_and_never_clipped(hold: Hold) -> None:
    held = hold()
    first = held.server.journal.current
    owners = [Owner(held, name, 1.5 if name == "west" else SIZES[name]) for name in NAMES]
    play(held, owners)
    (failed,) = held.events("failed")
    assert (failed["client"], failed["reason"]) == ("west", "InputError")
    assert "lie beyond 1" in json.dumps(owners[3].noted("failed")[0])
    assert "1.5" not in held.server.journal.path.read_text()
    assert mean_of(held, first) == pytest.approx((0.11 - 0.23 + 0.31) / 3, abs=STEP)


def test_a_rule_that_shortens_does_so_at_the_client(hold: Hold) -> None:
    held = hold(rule={**UNIFORM, "clip_norm": 0.5})
    first = held.server.journal.current
    play(held, [Owner(held, name, 40.0) for name in NAMES])
    change = change_of(held, first, held.server.journal.current)
    assert float(change.norm()) == pytest.approx(0.5, abs=1e-3)


def test_long_messages_travel_in_parts(hold: Hold, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (secure_part, line):
        monkeypatch.setattr(module, "PART_BYTES", 200)
    held = hold()
    first = held.server.journal.current
    play(held, [Owner(held, name, SIZES[name]) for name in NAMES])
    assert max(event["bytes"] for event in held.events("answered")) > 200
    assert mean_of(held, first) == pytest.approx(0.165, abs=STEP)


def test_a_policy_counts_those_that_are_left_in_the_sum(hold: Hold, monkeypatch: pytest.MonkeyPatch) -> None:
    held = hold(round={**QUICK, "attempts": 1})
    owners = [Owner(held, name, SIZES[name], minimum_cohort=4) for name in NAMES]
    send = owners[2].part._send

    def gone(round_: int, kind: str, packed: bytes) -> str:
        if kind == "masked":
            owners[2].vanish()
        return send(round_, kind, packed)

    monkeypatch.setattr(owners[2].part, "_send", gone)
    play(held, owners)
    assert any("3 clients are left in it, fewer than 4" in text for text in owners[0].said)
    assert not [event for event in held.events("answered") if event["step"] in ("consent", "reveal")]
    assert not held.events("summed")
    assert "policy, minimum_cohort" in held.events("gave_up")[0]["why"]


def test_an_authoritys_certificates_are_refused(hold: Hold) -> None:
    held = hold()
    arguments = (held.folder / "other", held.folder / "checkpoints", terms_of(held.job), None)
    with pytest.raises(InputError, match="goes by the keys that clients were enrolled with"):
        Server(held.job, *arguments, Direct(lambda order: {}), lambda text: None)


@pytest.mark.parametrize("step", STEPS)
def test_a_client_that_sends_garbage_is_named_and_the_others_go_on(step: str, hold: Hold) -> None:
    held = hold()
    owners = {name: Owner(held, name, SIZES[name]) for name in NAMES}
    bad = owners["west"]
    send = bad.part._send
    bad.part._send = lambda r, kind, packed: send(r, kind, b"\xff" * 64 if kind == step else packed)  # type: ignore[method-assign]
    for owner in owners.values():
        owner.start()
    wait_for(lambda: held.events("stepped"), "the step")
    (failed,) = held.events("failed")
    assert (failed["client"], failed["state"]) == ("west", "refused")
    assert "its message cannot be read" in failed["reason"]
    for owner in owners.values():
        owner.join()


def test_no_update_can_be_read_on_the_servers_disk(hold: Hold) -> None:
    """Each of a client's values is one number, which would be there a hundred times over in any plain form."""
    held = hold(rounds=2)
    seen: list[str] = []
    folder = held.server.journal.path.parent
    forms: dict[str, bytes] = {}
    for name, size in SIZES.items():
        for dtype in ("<f4", "<f8"):
            forms[f"{name} {dtype}"] = np.full(4, size, dtype).tobytes()
        for dtype in ("<i4", "<i8"):
            forms[f"{name} {dtype}"] = np.full(4, np.rint(size / STEP), dtype).tobytes()
    files = set()

    def look(event: dict[str, Any]) -> None:
        for path in folder.rglob("*"):
            if path.is_file():
                files.add(path)
                raw = path.read_bytes()
                seen.extend(
                    f"{form} in {path.name} at {event['event']}" for form, plain in forms.items() if plain in raw
                )

    held.server.hears = look
    play(held, [Owner(held, name, SIZES[name]) for name in NAMES])
    assert len(files) > 20
    assert not seen
    assert forms["east <f4"] in (forms["east <f4"] + b"x"), "the search finds what is there"
    assert "loss" not in json.dumps([event["sums"] for event in held.events("update")])


def test_distributed_noise_protects_the_sum_and_is_accounted_for(hold: Hold) -> None:
    privacy = {"kind": "distributed", "noise": 2.0, "clip": 0.5, "budget": 100.0}
    held = hold(rounds=2, privacy=privacy, secure={"bits": 10, "range": 0.5, "threshold": 1.0, "colluding": 0.0})
    first = held.server.journal.current
    owners = [Owner(held, name, 0.0) for name in NAMES]
    for owner in owners:
        owner.start()
    wait_for(lambda: held.events("stepped"), "the step")
    after = held.events("stepped")[0]
    change = change_of(held, first, after["sha256"])
    spread = float(change.std()) * 4  # of the sum
    assert spread == pytest.approx(2.0 * 0.5, rel=0.1), "the noise of all is what one server would have added"
    for owner in owners:
        owner.join()
    spent = held.events("stepped")[-1]["privacy"]["spent"]
    assert spent["releases"] == 2
    assert "differential privacy for whether one client's updates are used or left out" in spent["statement"]
    assert [owner.conversation._state.released for owner in owners] == [2, 2, 2, 2]


def test_a_client_counts_its_own_releases_whatever_the_server_says(hold: Hold) -> None:
    privacy = {"kind": "distributed", "noise": 1.0, "clip": 0.5, "budget": 8.0}
    held = hold(rounds=1, privacy=privacy, secure={"bits": 10, "range": 0.5})
    owners = [Owner(held, name, 0.0) for name in NAMES]
    owners[1].conversation._state.release(1000)
    play(held, owners)
    assert held.events("summed")[0]["clients"] == ["east", "south", "west"]
    assert any("would exceed the privacy budget" in text for text in owners[1].said)


def test_central_noise_under_masks_clips_at_the_client(hold: Hold) -> None:
    """Of the sum's noise there is 0.125 along the direction in which all updates lie."""
    held = hold(privacy={"kind": "central", "noise": 1.0, "clip": 0.5}, secure={"bits": 20})
    first = held.server.journal.current
    play(held, [Owner(held, name, 40.0) for name in NAMES])
    change = change_of(held, first, held.server.journal.current)
    assert float(change.sum()) / len(change) ** 0.5 == pytest.approx(0.5, abs=0.7)
    assert held.events("stepped")[0]["privacy"]["spent"]["releases"] == 1
