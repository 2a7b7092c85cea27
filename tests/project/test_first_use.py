# SPDX-License-Identifier: Apache-2.0
"""What a new user stumbled over."""

import logging
import subprocess
import sys

import pytest
import torch
from torch import nn

import fedvitals as fv
from fedvitals.cli.main import main
from fedvitals.errors import ConfigError
from fedvitals.records import Event, Finding, Where
from fedvitals.store import open_reader
from fedvitals.store.read import queries
from fedvitals.testing import MemorySink
from support.conditions import holds_for_each


def each_client(history, number):
    """One finding a client and round; knows neither the run nor the time."""
    for node in history.latest("steps", number):
        yield Finding(Where("", number, node), 0, "TEST", "warning", 0.5, f"{node} was seen")


def small_run(store, **settings):
    with fv.Monitor(store, "d", **settings) as monitor:
        for number in range(3):
            with monitor.round(number):
                for node in ("c0", "c1", "c2"):
                    model = nn.Linear(3, 2)
                    optimizer = torch.optim.SGD(model.parameters(), 0.1)
                    with monitor.client(node, model):
                        model(torch.randn(4, 3)).sum().backward()
                        optimizer.step()
    return monitor


def test_what_detectors_say_while_the_run_closes_is_kept(tmp_path):
    """A short run closes before its detectors have looked: their findings are stored all the same, of this run."""
    monitor = small_run(tmp_path / "d.db", detectors=[each_client], strict=True)
    assert monitor.lost == 0
    with open_reader(tmp_path / "d.db") as reader:
        found = queries.records(reader, monitor.run.id, Finding)
    assert len(found) == 9
    assert holds_for_each(finding.at > 0 for finding in found)


def test_findings_stand_on_the_card(tmp_path, capsys):
    """`show` tells what was found, each trouble once, and by how many."""
    small_run(tmp_path / "d.db", detectors=[each_client], strict=True)
    with pytest.raises(SystemExit):
        main(["show", "d", "--store", str(tmp_path / "d.db")])
    out = capsys.readouterr().out
    assert "Health: 3 findings, 3 still there." in out
    assert "1 detector looked." in out
    assert "c0 was seen" in out
    assert "no detector is installed" not in out


def test_a_detector_that_raises_costs_only_itself():
    """It is named in an event; the others go on, and nothing counts as lost."""

    def broken(history, number):
        raise KeyError("oops")

    sink = MemorySink()
    monitor = small_run(None, detectors=[broken, each_client], sinks=[sink])
    assert monitor.lost == 0
    assert len(monitor.findings()) == 9
    (event,) = [e for e in sink.records if isinstance(e, Event) and e.name == "monitor.error"]
    assert "the detector 'broken'" in event.message


@pytest.mark.thorough
def test_warnings_are_still_printed_where_nobody_set_up_logging():
    """Our handler on the root logger must not silence what Python would have printed."""
    code = (
        "import logging, fedvitals as fv\n"
        "m = fv.Monitor(None)\n"
        "with m, m.round(0):\n"
        "    logging.getLogger('mine').warning('said once')\n"
        "    logging.getLogger('mine').info('not said')\n"
        "    with m.client('c0'):\n"
        "        m.log(loss='abc')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.count("said once") == 1
    assert "not said" not in done.stderr
    assert "could not finish log()" in done.stderr


def test_with_logging_set_up_nothing_is_printed_twice(caplog):
    """Another handler is there: ours keeps quiet."""
    monitor = fv.Monitor(None, strict=True)
    with caplog.at_level(logging.WARNING), monitor, monitor.round(0):
        logging.getLogger("mine").warning("said once")
    assert [r.getMessage() for r in caplog.records] == ["said once"]


def test_a_loss_may_be_logged_as_the_tensor_it_is():
    """A tensor that requires a gradient is taken without PyTorch's warning."""
    sink = MemorySink()
    with fv.Monitor(None, sinks=[sink], strict=True) as monitor, monitor.round(0):
        monitor.log(loss=torch.ones(1, requires_grad=True).sum() * 2)
    assert sink.value("loss") == 2


def test_misplaced_arguments_are_named():
    with pytest.raises(ConfigError, match="Name it as store="), fv.watch(nn.Linear(2, 2), "one.db"):
        pass
    with pytest.raises(ConfigError, match="takes a list of functions"):
        fv.Monitor(None, detectors=each_client)
    with pytest.raises(ConfigError, match="takes a preset's name or a list"):
        fv.Monitor(None, probes=lambda view: {})


def test_an_array_of_an_unknown_family_costs_only_itself():
    """The probe's other results are kept; the array is told with the families that exist."""

    def mine(view):
        return {"answer": 42.0, "mine.layers": torch.ones(2)}

    sink = MemorySink()
    monitor = fv.Monitor(None, sinks=[sink], probes=["light", mine])
    with monitor, monitor.round(0), monitor.client("c0", nn.Linear(2, 2)):
        pass
    assert sink.value("user.answer", node="c0") == 42
    assert any("Unknown family" in e.message for e in sink.records if isinstance(e, Event))


def test_a_pipe_gets_whole_rows(tmp_path, capsys):
    """Where nobody looks at a terminal, nothing is cut."""
    small_run(tmp_path / "d.db", strict=True)
    with pytest.raises(SystemExit):
        main(["query", "SELECT * FROM layer_statistics LIMIT 2", "--store", str(tmp_path / "d.db")])
    assert "…" not in capsys.readouterr().out
