# SPDX-License-Identifier: Apache-2.0
"""The page of a run's tape: what it says is what the tape has, whatever state the tape is in and whatever it names."""

import shlex
import shutil
import sys
from importlib import import_module

import msgspec
import numpy as np
import pytest
import torch
from starlette.testclient import TestClient

import fedvitals as fv
from fedvitals import lab
from fedvitals.dashboard.app import create_app
from fedvitals.dashboard.pages.replay import ReplayIndex, ReplayRound, replay_index, replay_round
from fedvitals.dashboard.pages.shell_commands import Here, commands_of
from fedvitals.dashboard.pages.tape_index import NoTapeError, RoundCoverage, TapedRound, coverages, opened
from fedvitals.dashboard.pages.what_if import RULES, WhatIf, what_if
from fedvitals.errors import ConfigError
from fedvitals.records import Finding, Run
from fedvitals.replay.tape.journal import RoundJournal
from fedvitals.replay.tape.reader import open_tape
from fedvitals.store import open_reader
from fedvitals.store.read import queries
from support.conditions import holds_for_each
from support.taped_by_hand import CLIENTS, FAILS, NOISY, ROUNDS, recorded, stored, written

pytestmark = pytest.mark.thorough  # CI runs it; `scripts/test --fast` does not

HOME = "http://127.0.0.1:8321"
LAST = ROUNDS - 1
EVIL = "c1'; rm -rf ~ #\"><img src=x onerror=alert(1)>, c9"


@pytest.fixture(scope="module")
def taped(tmp_path_factory):
    store = tmp_path_factory.mktemp("replay") / "runs.db"
    return store, recorded(store)


@pytest.fixture
def reader(taped):
    with open_reader(taped[0]) as reader:
        yield reader


@pytest.fixture
def tape(taped):
    return open_tape(*taped)


def flat(tensors):
    return torch.cat([tensor.reshape(-1).double() for tensor in tensors.values()])


# -- the scrubber -----------------------------------------------------------------------------------------------------


def test_the_index_says_what_the_tape_can_do(reader, taped, tape):
    found = replay_index(reader, *taped)
    covered = tape.coverage()
    assert found.there
    assert [*found.rounds] == [one.round for one in covered]
    assert [kind == "whole" for kind in found.kinds] == [one.stored for one in covered]
    assert {"whole", "again"} == set(found.kinds)
    assert [*found.since] == [one.since for one in covered]
    assert [*found.updates] == [one.updates for one in covered]
    assert [*found.answers] == [one.answers for one in covered]
    assert [*found.failed] == [int(number == 4) for number in range(ROUNDS)]
    assert found.bytes == tape.bytes


def test_findings_are_flags_of_their_rounds(reader, taped):
    flags = replay_index(reader, *taped).flags
    told = {f.where.round for f in queries.records(reader, taped[1], Finding) if f.severity != "note"}
    assert {flag.round for flag in flags} == told
    assert 4 in told  # the failure
    assert holds_for_each(flag.words and flag.count for flag in flags)


def test_a_round_that_went_back_is_run_from_before_that():
    whole = frozenset({"aa" * 16, "bb" * 16})
    rows = [TapedRound(i, (digest * 16,)) for i, digest in enumerate(("aa", "cc", "bb"))]
    rows.append(TapedRound(3, ("dd" * 16,), restores=0))
    found = coverages(rows, whole, from_seed=False)
    assert [one.since for one in found] == [0, 0, 2, 0]
    assert [one.kind for one in found] == ["whole", "again", "whole", "again"]
    lost = coverages(rows[1:2], whole, from_seed=False)
    assert [(one.kind, one.since) for one in lost] == [("digests", None)]
    assert coverages(rows[1:2], whole, from_seed=True)[0].since == 0


def test_each_entry_is_read_once_for_all_requests(taped, monkeypatch):
    read = []
    plain = RoundJournal.read_as
    monkeypatch.setattr(
        RoundJournal, "read_as", lambda self, kind, n: read.append((kind.__name__, n)) or plain(self, kind, n)
    )
    with TestClient(create_app(taped[0]), base_url=HOME) as client:
        for _ in range(3):
            client.get(f"/api/runs/{taped[1]}/replay")
        assert read == [("EntrySummary", number) for number in range(ROUNDS)]
        read.clear()
        client.get(f"/api/runs/{taped[1]}/replay/5?node=c1")
        assert read == [("RoundEntry", 5), ("Before", 4)]


# -- one round --------------------------------------------------------------------------------------------------------


def test_the_state_of_a_round_is_the_tapes(reader, taped, tape):
    found, entry = replay_round(reader, *taped, 2), tape.entry(2)
    assert (found.digest, found.digest_after) == (entry.state["model"].digest, entry.after["model"].digest)
    assert [(one.name, one.before) for one in found.layers] == [
        *zip(tape.setting.layers, entry.state["model"].norms, strict=True)
    ]
    assert not any(one.same for one in found.layers)
    before = tape.entry(1).metrics
    assert {one.name: (one.before, one.after) for one in found.metrics} == {
        name: (before[name], value) for name, value in entry.metrics.items()
    }
    assert replay_round(reader, *taped, 0).metrics[0].before is None


def test_where_both_models_are_whole_the_step_of_each_layer_is_told(reader, taped, tape):
    found = replay_round(reader, *taped, LAST)
    assert found.stepped
    before, after = tape.state(LAST)["model"], tape.state(LAST + 1)["model"]
    for one in found.layers:
        assert one.step == pytest.approx(float((after[one.name] - before[one.name]).double().norm()), rel=1e-5)
    assert not replay_round(reader, *taped, 1).stepped


def test_the_cohort_says_who_was_used_and_who_failed_and_why(reader, taped, tape):
    found, entry = replay_round(reader, *taped, 4), tape.entry(4)
    assert (found.total, found.used, found.failed, found.left_out) == (CLIENTS, CLIENTS - 1, 1, 0)
    assert [row.node for row in found.cohort][: len(found.suspects)] == [*found.suspects]
    worst = found.cohort[len(found.suspects)]
    assert (worst.node, worst.state, worst.digest, worst.norm) == (FAILS, "failed", None, None)
    assert "on purpose" in worst.why
    rest = [row for row in found.cohort if row is not worst]
    assert sum(row.share for row in rest) == pytest.approx(1)
    assert {row.node: row.digest for row in rest} == {c.node: c.mark.digest for c in entry.came if c.mark}
    norms = reader.history(taped[1]).latest("update.norm", 4)
    middle = np.median([norms[row.node] for row in rest])
    for row in rest:
        assert row.norm == pytest.approx(norms[row.node])
        assert row.ratio == pytest.approx(norms[row.node] / middle)
        losses = np.frombuffer(entry.reply_of(row.node).losses, "<f4")
        assert (row.first_loss, row.last_loss, row.steps) == (losses[0], losses[-1], len(losses))


def test_the_cohort_is_sorted_and_paged(reader, taped):
    by_name = replay_round(reader, *taped, 4, sort="name")
    assert [row.node for row in by_name.cohort] == [f"c{i}" for i in range(CLIENTS)]
    back = replay_round(reader, *taped, 4, sort="-name", limit=2, offset=1)
    assert ([row.node for row in back.cohort], back.total, back.offset) == (["c4", "c3"], CLIENTS, 1)
    norms = [row.norm for row in replay_round(reader, *taped, 3, sort="norm").cohort]
    assert norms == sorted(norms, reverse=True)


def test_a_client_is_compared_layer_by_layer(reader, taped):
    found = replay_round(reader, *taped, 3, NOISY).client
    measured = queries.layer_round(reader, taped[1], "update", 3)
    nodes = [node for node in measured.nodes if node is not None]
    values = np.asarray(measured.get("l2"), float)[[measured.nodes.index(node) for node in nodes]]
    assert (found.there, found.clients, found.cosine) == (True, CLIENTS, None)
    assert "on the tape whole" in found.cosines
    for i, one in enumerate(found.layers):
        assert one.ratio == pytest.approx(values[nodes.index(NOISY), i] / np.median(values[:, i]), rel=1e-5)
    assert len(found.losses) == found.row.steps


def test_directions_are_compared_where_all_updates_are_on_the_tape(reader, taped, tape):
    found, entry = replay_round(reader, *taped, LAST, NOISY).client, tape.entry(LAST)
    start = flat(tape.state(LAST)["model"])
    deltas = {came.node: flat(tape.update(LAST, came.node)) - start for came in entry.came}
    total = sum(came.weight for came in entry.came)
    mean = sum(deltas[came.node] * came.weight / total for came in entry.came)
    wanted = float(deltas[NOISY] @ mean / deltas[NOISY].norm() / mean.norm())
    assert found.cosine == pytest.approx(wanted, abs=1e-6)
    assert holds_for_each(-1.0001 <= one.cosine <= 1.0001 for one in found.layers)


def test_a_client_that_did_not_answer(reader, taped):
    found = replay_round(reader, *taped, 3, "nobody")
    assert not found.client.there
    assert not any("into nobody" in one.text for one in found.commands)


def test_no_such_round(reader, taped):
    with pytest.raises(ConfigError, match="rounds 0 to 6"):
        replay_round(reader, *taped, 99)


# -- commands ---------------------------------------------------------------------------------------------------------


def test_commands_are_those_of_the_terminal(reader, taped):
    texts = [one.text for one in replay_round(reader, *taped, 4, NOISY).commands]
    where = f"{taped[1]} --store {taped[0]}"
    assert texts[:3] == [
        f"fedvitals replay {where} --verify --rounds 4-4",
        f"fedvitals replay {where} -c 'goto 4; into c4'",
        f"fedvitals replay {where} -c 'goto 4; fork drop c4'",
    ]


def test_commands_are_understood_by_the_session(reader, taped):
    """What a page offers to copy is what the command line takes: its own parsers are asked."""
    commands = pytest.importorskip("fedvitals.replay.debugger.commands").COMMANDS
    from fedvitals.replay.counterfactual.change import parse

    texts = [one.text for one in replay_round(reader, *taped, 4, NOISY).commands]
    texts += [what_if(reader, *taped, 1, [NOISY, "c1"], rule).command for rule in RULES]
    verbs = {"replay": "fedvitals.cli.replay.command", "bisect": "fedvitals.cli.bisect"}
    for text in texts:
        words = shlex.split(text)
        known = {name for option in import_module(verbs[words[1]]).command.params for name in option.opts}
        assert {word for word in words if word.startswith("-")} <= known
        session = words[words.index("-c") + 1] if "-c" in words else ""
        for one in filter(None, map(str.strip, session.split(";"))):
            verb, _, rest = one.partition(" ")
            assert verb in commands
            if verb in ("fork", "whatif"):
                assert parse(rest).drop[0] == NOISY


def test_hostile_names_stay_one_word_of_the_shell(tmp_path):
    store = tmp_path / "it's a store.db"
    for node in (EVIL, "-rf", "c1; into c2"):
        for one in commands_of(Here("$(reboot)", store, "lab", 3, node, True), RoundCoverage("whole", 3, 0), ()):
            words = shlex.split(one.text)
            assert words[:3] == ["fedvitals", "replay", "$(reboot)"]
            assert words[words.index("--store") + 1] == str(store)
            assert not {"rm", "reboot", "~"} & set(words)


@pytest.mark.parametrize(
    ("host", "kind", "count"), [("lab", "digests", 0), ("flower", "digests", 2), ("torch", "whole", 2)]
)
def test_only_what_can_be_done_is_offered(host, kind, count):
    found = commands_of(Here("r", "runs.db", host, 3), RoundCoverage(kind, None, 0), ())
    assert ["--store" in one.text for one in found] == [False] * count  # the default one needs no word
    assert ["--loop" in one.text for one in found] == [host == "torch"] * count
    assert any("--tape FOLDER --round 3 --node" in one.text for one in found) == (host == "flower")


# -- what if ----------------------------------------------------------------------------------------------------------


def test_put_together_again_the_updates_give_the_recorded_model(reader, taped):
    found = what_if(reader, *taped, LAST)
    assert (found.ready, found.same, found.against, found.own) == (True, True, "the recorded step", "FedAvg")
    assert found.apart == pytest.approx(0, abs=1e-6)
    assert found.cosine == pytest.approx(1)


def test_without_a_client_the_model_goes_where_the_others_go(reader, taped, tape):
    found, entry = what_if(reader, *taped, LAST, [NOISY]), tape.entry(LAST)
    # The recorded model is tested to what was measured then; the error is that of a share of so many samples.
    score = found.score
    assert score.recorded == pytest.approx(entry.metrics["accuracy"])
    assert score.error == pytest.approx((score.changed * (1 - score.changed) / score.samples) ** 0.5, rel=0.01)
    assert score.difference == pytest.approx(score.changed - score.recorded)
    start, after = flat(tape.state(LAST)["model"]), flat(tape.state(LAST + 1)["model"])
    rest = [came for came in entry.came if came.node != NOISY]
    total = sum(came.weight for came in rest)
    model = sum(flat(tape.update(LAST, came.node)) * came.weight / total for came in rest)
    assert (found.used, found.of, found.dropped) == (CLIENTS - 1, CLIENTS, (NOISY,))
    assert found.recorded == pytest.approx(float((after - start).norm()), rel=1e-4)
    assert found.changed == pytest.approx(float((model - start).norm()), rel=1e-4)
    assert found.apart == pytest.approx(float((model - after).norm()), rel=1e-4)
    assert found.share == pytest.approx(found.apart / found.recorded)
    assert found.apart**2 == pytest.approx(sum(one.apart**2 for one in found.layers), rel=1e-4)


def test_files_that_a_tape_names_are_not_read(tmp_path):
    for package in ("a", "b"):
        folder = tmp_path / "private" / package
        folder.mkdir(parents=True)
        (folder / "notes.txt").write_text("Something that only its owner should read. " * 100)
    experiment = lab.Experiment(
        dataset=lab.Text(folder=str(tmp_path / "private"), pattern="*.txt", steps=8, packages=2),
        model=lab.LSTM(hidden=4), clients=3, rounds=2, local=lab.Local(iterations=2),
    )  # fmt: skip
    store = tmp_path / "runs.db"
    with fv.Monitor(store, run="text", host="lab", tape=fv.Tape(updates=2)) as monitor:
        lab.run(experiment, monitor, workers=1)
    with open_reader(store) as reader:
        found = what_if(reader, store, monitor.run.id, 1, ["c1"])
    assert (found.ready, found.used, found.score) == (True, 2, None)


@pytest.mark.parametrize("rule", RULES)
def test_another_rule(reader, taped, rule):
    found = what_if(reader, *taped, LAST, [], rule)
    assert found.ready
    assert (found.apart < 1e-6) == (rule == "fedavg")


def test_what_is_not_on_the_tape_is_said_with_the_command(reader, taped):
    found = what_if(reader, *taped, 1, [NOISY], "median")
    assert not found.ready
    assert f"of the {CLIENTS} updates" in found.why
    assert found.command.endswith("-c 'goto 1; whatif drop c4 and aggregator median'")


def test_who_was_not_there_cannot_be_left_out(reader, taped):
    found = what_if(reader, *taped, LAST, ["nobody"])
    assert any("nobody" in note for note in found.notes)
    assert found.apart == pytest.approx(0, abs=1e-6)
    alone = what_if(reader, *taped, LAST, [f"c{i}" for i in range(CLIENTS)])
    assert not alone.ready
    assert "nothing to aggregate" in alone.why
    with pytest.raises(ConfigError, match="median"):
        what_if(reader, *taped, LAST, [], "medain")


# -- tapes written by hand --------------------------------------------------------------------------------------------


def test_without_telemetry_norms_come_from_the_tape(tmp_path):
    store = tmp_path / "hand.db"
    written(store, "hand", ["a", "b", "x"], left_out=["x"])
    with open_reader(store) as reader:
        last = replay_round(reader, store, "hand", 2, "a")
        assert last.norms == "of updates, from the tape"
        assert {row.node: round(row.norm, 5) for row in last.cohort if row.state == "used"} == {"a": 3.0, "b": 6.0}
        assert last.client.cosine == pytest.approx(1)
        assert [row.node for row in last.cohort if row.state == "left out"] == ["x"]
        early = replay_round(reader, store, "hand", 1, "a")
        assert "of whole models" in early.norms
        assert early.client.layers[0].norm == pytest.approx(4.0)  # 4 values of 2
        assert (early.clock, early.clock_after) == (1.0, 2.0)
        found = what_if(reader, store, "hand", 2, ["b"])
        assert (found.changed, found.used, found.of) == (pytest.approx(3.0), 1, 2)
        assert any("own rule" in note for note in found.notes)


def test_corrections_in_force_are_told_whatever_they_hold(tmp_path):
    store = tmp_path / "hand.db"
    actions = [
        {"kind": "reweight", "target": "a", "finding": "F", "arguments": {"factor": 0.5}},
        "nonsense",
        {"arguments": {}},
    ]
    folder = written(store, "hand", ["a"])
    journal = RoundJournal(folder)
    entry = journal.read(1)
    entry.notes["actions"] = actions
    journal.write(entry)
    with open_reader(store) as reader:
        found = replay_round(reader, store, "hand", 1)
        assert [(one.kind, one.target, one.arguments) for one in found.actions] == [
            ("reweight", "a", "factor 0.5"), ("", None, ""),
        ]  # fmt: skip


@pytest.fixture
def hand(tmp_path):
    store = tmp_path / "hand.db"
    return store, written(store, "hand", ["a", "b"], rounds=4)


def asked(store, *paths):
    with TestClient(create_app(store), base_url=HOME, raise_server_exceptions=False) as client:
        return [client.get(f"/api/runs/hand/replay{path}") for path in paths]


@pytest.mark.parametrize("content", [b"", b"nonsense", b"\x28\xb5\x2f\xfd" + b"\xff" * 40])
def test_a_damaged_round_is_named_and_the_others_are_read(hand, content):
    store, folder = hand
    (folder / "rounds" / "00000001").write_bytes(content)
    index, bad, good, what = asked(store, "", "/1", "/2", "/1/whatif")
    assert index.json()["kinds"] == ["whole", "damaged", "whole", "whole"]
    assert bad.status_code == 200
    assert "cannot be read" in bad.json()["trouble"]
    assert bad.json()["commands"] == []
    assert good.json()["total"] == 2
    assert good.json()["metrics"][0]["before"] is None
    assert not what.json()["ready"]


def test_damaged_states_are_told_and_nothing_else_suffers(hand):
    store, folder = hand
    for file in (folder / "objects").glob("??/*"):
        file.write_bytes(file.read_bytes()[:-3] + b"xyz")
    found, what = asked(store, "/3?node=a", "/3/whatif")
    assert (found.status_code, found.json()["stepped"]) == (200, False)
    assert found.json()["total"] == 2
    assert not what.json()["ready"]
    assert "on the tape" in what.json()["why"]


def test_a_damaged_setting_is_a_tape_that_cannot_be_read(hand):
    store, folder = hand
    (folder / "tape.json").write_text("{")
    index, round_ = asked(store, "", "/1")
    assert (index.json()["there"], index.json()["code"]) == (False, "")
    assert "cannot be read" in index.json()["why"]
    assert round_.status_code == 404


def test_hostile_entries_do_no_harm(hand):
    """Digests that are paths, lengths that do not fit, clocks that are none."""
    store, folder = hand
    journal = RoundJournal(folder)
    entry = journal.read(2)
    evil = type(entry.came[0].mark)("../../../../etc/passwd", ("x",), (None,) * 50)
    came = (type(entry.came[0])("a", evil, float("1e308"), losses=b"abc"),)
    journal.write(type(entry)(2, {"model": evil}, {"clock": "moon", "actions": 7}, came, {"model": evil}))
    index, found, what = asked(store, "", "/2?node=a", "/2/whatif")
    assert index.status_code == found.status_code == what.status_code == 200
    assert index.json()["kinds"][2] == "damaged"
    assert found.json()["trouble"]


def test_a_run_without_a_tape_says_how_to_get_one(tmp_path):
    stored(tmp_path / "bare.db", Run(id="hand", name="bare", host="torch"))
    index, round_, what = asked(tmp_path / "bare.db", "", "/0", "/0/whatif")
    assert (index.status_code, index.json()["there"]) == (200, False)
    assert "tape=fv.Tape(" in index.json()["code"]
    assert (round_.status_code, what.status_code) == (404, 404)
    assert "no tape" in round_.json()["error"]["message"]


def test_a_run_whose_id_is_a_path_has_no_tape(hand):
    store, _ = hand
    with open_reader(store) as reader:
        for run in ("../tape/hand", "..", "a\\b"):
            with pytest.raises(NoTapeError):
                opened(reader, store, run)


def test_without_the_extra_the_page_names_it(hand, monkeypatch):
    monkeypatch.setitem(sys.modules, "fedvitals.replay.tape.reader", None)
    (index,) = asked(hand[0], "")
    assert not index.json()["there"]
    assert "fedvitals[replay]" in index.json()["why"]


def test_a_tape_that_thins_is_asked_anew(hand):
    store, folder = hand
    with TestClient(create_app(store), base_url=HOME) as client:
        before = client.get("/api/runs/hand/replay")
        same = client.get("/api/runs/hand/replay", headers={"If-None-Match": before.headers["etag"]})
        assert same.status_code == 304
        shutil.rmtree(folder / "objects")
        after = client.get("/api/runs/hand/replay", headers={"If-None-Match": before.headers["etag"]})
        assert after.status_code == 200
        assert set(after.json()["kinds"]) == {"digests"}
        assert client.get("/api/runs/hand/replay/1").json()["commands"] == []


def test_questions_that_make_no_sense_are_refused(hand):
    for path in (
        "/x",
        "/-1",
        "/1?limit=0",
        "/1?limit=501",
        "/1?sort=up",
        "/1/whatif?rule=mode",
        f"/1?node={'n' * 1001}",
    ):
        (found,) = asked(hand[0], path)
        assert found.status_code == 422


def test_every_answer_has_the_shape_that_the_api_promises(taped):
    with TestClient(create_app(taped[0]), base_url=HOME) as client:
        run = f"/api/runs/{taped[1]}/replay"
        for path, shape in (
            (run, ReplayIndex), (f"{run}/4?node={FAILS}", ReplayRound), (f"{run}/{LAST}?node=c1", ReplayRound),
            (f"{run}/{LAST}/whatif?drop=c1", WhatIf), (f"{run}/1/whatif", WhatIf),
        ):  # fmt: skip
            msgspec.json.decode(client.get(path).content, type=shape)
