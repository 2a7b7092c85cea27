# SPDX-License-Identifier: Apache-2.0
"""The lab runs the federations of `check_host`: its faults are the script's troubles."""

from fedvitals import lab
from fedvitals.hosts.lab_monitor import monitor_of

FAULTS = {"fails": lab.Crash, "late": lab.Timeout, "lost": lab.LostMessage}


class RoundsBegun:
    """An observer that passes everything on, and tells the script when a round has begun."""

    def __init__(self, monitor, script):
        self._host, self._monitor, self._script = monitor.host, monitor, script

    def __getattr__(self, name):
        return getattr(self._host, name)

    def round_begin(self, round_index, *args):
        self._host.round_begin(round_index, *args)
        self._script.in_round(round_index, self._monitor.close)


class LabHost:
    name = "lab"
    cannot = {"hostile telemetry": "the lab's clients are its own code, in its own processes"}  # noqa: RUF012

    def client_names(self, count):
        return [f"c{i}" for i in range(count)]

    def run(self, script, store):
        experiment = self.experiment(script)
        with monitor_of(experiment, str(store), run=None, probes="standard") as monitor:
            for outcome in lab.rounds(experiment, RoundsBegun(monitor, script), engine="sequential"):
                for node in outcome.rounds[-1].losses:
                    script.took(outcome.rounds[-1].number, node)
            script.at_end(monitor.close)

    def experiment(self, script):
        faults = [FAULTS[trouble](nodes=[node], since=at, until=at) for at, node, trouble in script.troubles]
        topology = lab.Centralized()
        if script.slow is not None:
            faults, topology = [lab.Straggler(nodes=[script.slow], factor=2.5)], lab.Asynchronous(buffer=2)
        return lab.Experiment(
            name=script.name,
            clients=len(script.clients),
            rounds=script.rounds,
            dataset=lab.Synthetic(samples=240, features=6, classes=3),
            model="logistic",
            local=lab.Local(iterations=3, batch=8),
            topology=topology,
            faults=faults,
            network=lab.Network(deadline_seconds=None if script.slow is not None else 60.0),
        )
