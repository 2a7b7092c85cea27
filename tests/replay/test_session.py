# SPDX-License-Identifier: Apache-2.0
"""The debugger from Python: a place in a run, and everything that can be seen from there."""

import csv
import json
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

import fedvitals as fv
from fedvitals import lab
from fedvitals.errors import ConfigError, StoreError
from fedvitals.replay.debugger import debugger_output
from fedvitals.replay.player.trace import trace_client
from fedvitals.replay.tape.digests import state_digest_of
from fedvitals.replay.tape.retention import losses_of
from support.recorded_run import ROUNDS, record


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return record(tmp_path_factory.mktemp("rewound"))


@pytest.fixture
def session(store):
    with fv.open_replay("rewound", store) as opened:
        yield opened


@pytest.mark.thorough
def test_the_session_moves_through_rounds_and_clients(session):
    """Rounds, a client, its steps; ends are told, and nothing goes past them."""
    assert session.round == 0
    assert "round 4" in session.goto(4).title
    assert "round 5" in session.next().title
    assert "round 4" in session.back().title
    assert "step 0 of 12" in session.into("c1").title
    session.step(3)
    session.step(-1)
    assert (session.node, session.step_number) == ("c1", 2)
    assert "last step" in session.step(50).text
    assert session.step_number == 11
    session.step(-50)
    assert session.step_number == 0
    session.out()
    assert session.node is None
    session.goto(ROUNDS - 1)
    with pytest.raises(ConfigError, match="last one on the tape"):
        session.next()
    with pytest.raises(ConfigError, match="first one on the tape"):
        session.goto(0), session.back()


def test_wrong_places_are_refused_with_what_there_is(session):
    with pytest.raises(ConfigError, match="It has: 0–5"):
        session.goto(99)
    with pytest.raises(ConfigError, match="Known: c0, c1"):
        session.into("c99")
    with pytest.raises(ConfigError, match="into c7"):
        session.step()
    with pytest.raises(ConfigError, match="in no client"):
        session.out()
    with pytest.raises(ConfigError, match="Unknown run"):
        fv.open_replay("rewoundd", session.store)


def test_a_state_is_the_recorded_one_read_or_run_again(session):
    """Of every round, whether the tape has it or not; and of the run's end."""
    stored = [session.tape.has_state(number) for number in range(ROUNDS)]
    assert True in stored
    assert False in stored
    for number in (4, 1, 5, 0, 2, ROUNDS):
        marks = session.tape.marks(number)
        state = session.states.state(number)
        assert {name: state_digest_of(tensors).digest for name, tensors in state.items()} == {
            name: mark.digest for name, mark in marks.items()
        }


def test_what_was_run_again_once_is_at_hand(session):
    again = next(number for number in range(1, ROUNDS) if not session.tape.has_state(number))
    session.states.play(again)
    count = session.states.rerun_rounds
    session.states.play(again)
    session.states.state(again)
    assert session.states.rerun_rounds == count
    session.states.play(again + 1)
    assert session.states.rerun_rounds == count + 1


def test_progress_hears_of_every_round_that_is_run_again(session):
    heard = []
    session.progress = lambda *progress: heard.append(progress)
    # A slow machine may have been found slow in a round, whose state is then kept as well.
    last = max(number for number in range(1, ROUNDS) if not session.tape.has_state(number))
    first = max(number for number in range(last) if session.tape.has_state(number))
    session.states.play(last)
    assert heard == [(number, first, last) for number in range(first, last + 1)]


@pytest.mark.parametrize("engine", ["stacked", "sequential", "reuse"])
def test_gradients_are_those_of_the_step(tmp_path, engine):
    """Against autograd by hand: the step's weights, its batch, the same loss; and the update is the recorded one."""
    store = record(tmp_path, engine=engine, rounds=4)
    with fv.open_replay("rewound", store) as session:
        session.goto(2)
        session.into("c4")
        found = session.states.trace(2, "c4")
        assert found.exact
        assert len(found.steps) == 12
        recorded = losses_of(session.tape.entry(2).reply_of("c4"))
        for step in (0, 5, 11):
            session.step(step - session.step_number)
            one = session.at("c4")
            module = session.player.site.module
            x, y = found.batch(step)
            held = {name: tensor.clone().requires_grad_() for name, tensor in one.weights.items()}
            loss = nn.functional.cross_entropy(torch.func.functional_call(module, held, (x,)), y)
            by_hand = torch.autograd.grad(loss, [*held.values()])
            for gradient, expected in zip(one.gradients.values(), by_hand, strict=True):
                torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)
            assert one.loss == pytest.approx(float(loss.detach()), rel=1e-5)
            assert np.float32(one.loss) == recorded[step]


@pytest.mark.thorough
@pytest.mark.parametrize("engine", ["stacked", "sequential"])
def test_each_step_leads_to_the_next_and_the_last_to_what_was_sent(tmp_path, engine):
    """By the formula of plain SGD: weights less rate times gradients."""
    store = record(tmp_path, engine=engine, rounds=2, faults=(), local=lab.Local(optimizer=lab.SGD(0.1)))
    with fv.open_replay("rewound", store) as session:
        steps = session.states.trace(1, "c1").steps
        later = [*(step.weights for step in steps[1:]), session.states.sent(1, "c1")]
        for step, after in zip(steps, later, strict=True):
            for name, weight in step.weights.items():
                torch.testing.assert_close(weight - 0.1 * step.gradients[name], after[name])


@pytest.mark.thorough
@pytest.mark.parametrize("topology", ["hierarchical", "rings", "clustered"])
def test_steps_are_exact_in_other_topologies(tmp_path, topology):
    store = record(tmp_path, topology=topology, rounds=3, faults=())
    with fv.open_replay("rewound", store) as session:
        for node in ("c0", "c3"):
            assert session.states.trace(2, node).exact


def test_steps_are_exact_where_optimisers_are_kept(tmp_path):
    """What an earlier look left in the engine must not be seen by the next."""
    store = record(tmp_path, rounds=4, faults=(), local=lab.Local(keep_optimizer=True))
    with fv.open_replay("rewound", store) as session:
        assert session.states.trace(2, "c1").exact
        assert session.states.trace(1, "c0").exact
        assert session.states.trace(3, "c5").exact
        session.states.play(2)
        assert session.states.trace(3, "c0").exact


def test_a_window_of_steps_fits_into_the_memory(session):
    """Of a model too large to keep every step of, those around the one that is asked for are kept."""
    size = session.player.site.layout.size
    found = trace_client(session.player, 1, "c1", first=4, memory=3 * 8 * size)
    assert found.kept == range(4, 7)
    assert len(found.steps) == 12
    assert found.steps[0].weights is None
    assert found.steps[11].loss is not None
    whole = trace_client(session.player, 1, "c1")
    for name, weight in found.steps[5].weights.items():
        assert torch.equal(weight, whole.steps[5].weights[name])


def test_a_client_that_failed_says_where(session):
    session.goto(3)
    assert "RuntimeError" in str(session.clients())
    assert "RuntimeError" in str(session.into("c2"))
    session.out()
    with pytest.raises(ConfigError, match="Nothing of use came from c2"):
        session.show("update c2")


def test_everything_that_has_a_name_can_be_shown(session):
    session.goto(2)
    assert session.show("weight").kind == "table"
    assert session.show("weight head").kind == "tensor"
    assert session.show("update").kind == "table"
    assert session.show("update", "c4", "head.bias").summary.shape == (10,)
    assert session.show("state").rows[0][-1] == session.tape.marks(2)["model"].digest
    assert session.show("loss").x == tuple(range(ROUNDS))
    assert len(session.show("loss c4").x) == 12
    assert "accuracy" in {row[0] for row in session.show("metric").rows}
    assert set(session.show("metric update.norm").lines) >= {"c0", "c4"}
    assert session.show("metric update.norm c4").lines["c4"]
    session.into("c4")
    assert session.show("gradient head").summary.shape == (10, 64)
    assert sum(row[1] for row in session.show("batch").rows) == 16
    assert "Step 0" in session.show("loss").note
    assert session.last.kind == "series"


def test_the_state_and_a_clients_weights_are_told_apart(session):
    """In a client, weights are its own, and change with its steps; the round's stay what they were."""
    session.goto(1)
    shared = session.show("weight head").summary
    session.into("c1")
    assert session.show("weight head").summary.norm == pytest.approx(shared.norm)
    session.step(4)
    assert session.show("weight head").summary.norm != shared.norm
    assert session.show("state head").summary == shared


def test_wrong_things_to_show_are_taught(session):
    with pytest.raises(ConfigError, match="gradient, loss, metric"):
        session.show("grdient")
    with pytest.raises(ConfigError, match="is a layer"):
        session.show("head")
    with pytest.raises(ConfigError, match=r"Did you mean 'head\.weight'"):
        session.show("weight hed.weight")
    with pytest.raises(ConfigError, match="a client's"):
        session.show("gradient")
    with pytest.raises(ConfigError, match="Unknown metric"):
        session.show("metric acuracy")


def test_an_update_stands_out_from_its_cohort(session):
    """Of c4, which learns noise, the direction is nobody else's; of a healthy one it is everybody's."""
    session.goto(4)
    cosine = {node: session.diff(node, "others").rows[-1][-1] for node in ("c4", "c1")}
    assert cosine["c4"] < 0.5 < cosine["c1"]
    both = session.diff("c4", "c1")
    assert both.rows[-1][1:3] == (
        pytest.approx(session.diff("c4", "others").rows[-1][1]),
        pytest.approx(session.diff("c1", "others").rows[-1][1]),
    )
    with pytest.raises(ConfigError, match="from itself"):
        session.diff("c1", "c1")
    with pytest.raises(ConfigError, match="Unknown client"):
        session.diff("c1", "c77")


def test_two_rounds_differ_by_what_was_aggregated_between(session):
    moved = session.diff(2, 3)
    before, after = session.states.model(2), session.states.model(3)
    distance = torch.sqrt(sum(((after[name] - before[name]) ** 2).sum() for name in before))
    assert moved.rows[-1][3] == pytest.approx(float(distance), rel=1e-5)
    assert "accuracy" in moved.note
    assert "to the last bit" in session.diff(2, 2).note


def test_running_on_stops_where_a_condition_holds(session):
    _, accuracies = session.history.series("accuracy", None)
    limit = (accuracies[2] + accuracies[3]) / 2
    hit = session.run_until(f"accuracy > {limit}")
    assert (hit.round, session.round) == (3, 3)
    session.goto(0)
    number = session.break_("event client.failed")
    session.watch("accuracy")
    hit = session.run_until()
    assert (hit.number, hit.round) == (number, 3)
    assert [hit.round for hit in session.watch_hits] == [1, 2, 3]
    assert session.run_until("loss > 1e9") is None
    assert session.round == ROUNDS - 1
    with pytest.raises(ConfigError, match="go back first"):
        session.run_until("any NaN")
    session.breakpoints.clear()
    with pytest.raises(ConfigError, match="There is no breakpoint yet"):
        session.run_until()


def test_a_run_is_proved_forked_and_asked_what_if(session):
    assert session.verify(2, 4).proved == [2, 3, 4]
    session.goto(3)
    found = session.whatif("drop c4", last=4)
    assert [turn.round for turn in found.turns] == [3, 4]
    forked = session.fork(drop=("c4",), until=4)
    with fv.open_replay(forked.run, session.store) as other:
        assert other.run.config["forked_at"] == 3
        assert "c4" not in {came.node for came in other.tape.entry(3).came if came.used}


def test_what_is_seen_can_be_exported(session, tmp_path):
    session.goto(2)
    state = safetensors.torch.load_file(session.export(tmp_path / "state.safetensors", "state"))
    assert torch.equal(state["model/head.bias"], session.states.model(2)["head.bias"])
    update = safetensors.torch.load_file(session.export(tmp_path / "update.safetensors", "update c4"))
    assert torch.equal(update["head.bias"], session.states.update(2, "c4")["head.bias"])
    session.into("c1")
    gradient = safetensors.torch.load_file(session.export(tmp_path / "g.safetensors", "gradient"))
    assert torch.equal(gradient["head.bias"], session.at("c1").gradients["head.bias"])
    session.clients()
    with session.export(tmp_path / "clients.csv").open() as file:
        assert [row["client"] for row in csv.DictReader(file)] == ["c0", "c1", "c2", "c3", "c4", "c5"]
    told = json.loads(session.export(tmp_path / "loss.json", "loss c1").read_text())
    assert len(told["lines"]["loss"]) == 12
    with pytest.raises(ConfigError, match=r"\.safetensors, \.csv, \.json"):
        session.export(tmp_path / "state.pt")
    with pytest.raises(ConfigError, match="no folder"):
        session.export(tmp_path / "nowhere" / "state.json")


def test_a_run_without_a_tape_says_how_to_get_one(tmp_path):
    with fv.Monitor(tmp_path / "runs.db", "bare") as monitor, monitor.round(0):
        pass
    with pytest.raises(StoreError, match="has no tape"):
        fv.open_replay("bare", tmp_path / "runs.db")


def test_a_summary_counts_what_is_odd():
    values = torch.tensor([[0.0, 3.0], [float("nan"), float("inf")], [-4.0, 0.0]])
    found = debugger_output.summarize(values)
    assert (found.shape, found.count, found.nan, found.inf, found.zeros) == ((3, 2), 6, 1, 1, 2)
    assert (found.min, found.max, found.mean) == (-4.0, 3.0, -0.25)
    assert sum(found.counts) == 4
    assert debugger_output.summarize(torch.tensor([3.0, 4.0])).norm == 5.0
    assert debugger_output.summarize(torch.full((5,), 2.0)).counts == (5,)
    assert debugger_output.summarize(torch.empty(0)).counts == ()
    assert np.isnan(debugger_output.summarize(torch.tensor([float("nan")])).mean)
    assert debugger_output.summarize(torch.tensor([1.5], dtype=torch.bfloat16)).norm == 1.5


def test_names_from_a_tape_move_no_cursor():
    told = str(debugger_output.table_output("a\x1b[2Jb", ("x",), [("c\x07d",)]))
    assert "\x1b" not in told
    assert "\x07" not in told


@pytest.mark.thorough
def test_a_live_run_is_held_looked_at_and_let_go(tmp_path):
    """`pause` holds it, `next` lets it do one more round, and closing the session lets it end."""
    code = f"""
        import time
        import fedvitals as fv
        from fedvitals import lab
        e = lab.Experiment(model="mlp", clients=4, rounds=60, seed=1)
        with fv.Monitor({str(tmp_path / "runs.db")!r}, "live", host="lab", tape=fv.Tape()) as monitor:
            lab.run(e, monitor, workers=1, engine="stacked", progress=lambda _: time.sleep(0.1))
    """
    running = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)])
    try:
        until = time.monotonic() + 120
        while time.monotonic() < until:
            try:
                session = fv.open_replay("live", tmp_path / "runs.db")
                break
            except (ConfigError, StoreError):
                time.sleep(0.2)
        with session:
            session.pause(timeout=120)
            held = session.running.held
            assert held == session.round
            assert session.next().title.startswith(f"round {held + 1} ")
            session.into("c1")
            assert session.states.trace(held + 1, "c1").exact
            hit = session.run_until(f"round {held + 4}", timeout=120)
            assert (hit.round, session.round, session.running.held) == (held + 4,) * 3
            assert running.poll() is None
        assert running.wait(120) == 0
    finally:
        running.kill()
        running.wait()


@pytest.mark.thorough
@pytest.mark.parametrize("engine", ["stacked", "sequential"])
def test_steps_are_exact_where_clients_remember_and_accumulate(tmp_path, engine):
    """A step's samples are those of all its mini-batches, and its gradients the shifted ones."""
    local = lab.Local(iterations=3, batch=4, accumulate=2, optimizer=lab.SGD(0.1))
    store = record(tmp_path, engine=engine, rounds=3, faults=(), aggregator="scaffold", local=local)
    with fv.open_replay("rewound", store) as session:
        found = session.states.trace(2, "c1")
        assert found.exact
        assert [len(found.batch(step.number)[1]) for step in found.steps] == [8, 8, 8]
        for step, after in zip(found.steps, found.steps[1:], strict=False):
            for name, weight in step.weights.items():
                torch.testing.assert_close(weight - 0.1 * step.gradients[name], after.weights[name])


def test_steps_without_an_optimiser_cannot_be_watched(tmp_path):
    store = record(tmp_path, engine="sequential", rounds=2, faults=(), local=lab.Local(optimizer=lab.plain_sgd()))
    with fv.open_replay("rewound", store) as session, pytest.raises(ConfigError, match="without an optimiser"):
        session.states.trace(1, "c1")
