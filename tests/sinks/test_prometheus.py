# SPDX-License-Identifier: Apache-2.0
"""Prometheus: what is served, within which bounds, and that the real server scrapes, answers and alerts."""

import json
import logging
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request

import pytest

from fedvitals.errors import ConfigError, MissingExtraError
from fedvitals.measurements import stamped
from fedvitals.records import Finding, Metric, Transfer, Where
from fedvitals.testing import check_sink
from support.exported_runs import RUN, round_of, run_of, small
from support.sinks import ending_queues

pytest.importorskip("prometheus_client")
from fedvitals.sinks.prometheus.sink import Prometheus
from fedvitals.sinks.prometheus.state import page_name
from support.conditions import holds_for_each
from support.waiting import PATIENCE

MISSING = "no Prometheus server to start (Debian, Ubuntu: apt install prometheus; scripts/servers does it for root)"
available = pytest.mark.skipif(shutil.which("prometheus") is None or shutil.which("promtool") is None, reason=MISSING)


@pytest.fixture
def exporter():
    sink = Prometheus(port=0)
    yield sink
    sink.close()


def scraped(sink: Prometheus) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every series of the page, read by the package's own parser."""
    from prometheus_client.parser import text_string_to_metric_families

    body, _ = sink.render()
    samples = [s for family in text_string_to_metric_families(body.decode()) for s in family.samples]
    found = {(s.name, tuple(sorted(s.labels.items()))): s.value for s in samples}
    assert len(found) == len(samples), "two series are the same"
    return found


def value(sink: Prometheus, name: str, **labels: str) -> float:
    return scraped(sink)[f"fedvitals_{name}", tuple(sorted({"run": "digits", **labels}.items()))]


def get(url: str, **headers: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=PATIENCE) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_a_run_on_the_page(exporter):
    """The whole, each node, the spread over clients and the counters, by Prometheus' names."""
    exporter.write(small())
    assert value(exporter, "round_seconds") == 4.0
    assert value(exporter, "accuracy_ratio") == pytest.approx(0.7)
    assert value(exporter, "node_update_norm", node="c1") == 50.0
    assert value(exporter, "nodes_update_norm", point="max") == 50.0
    assert value(exporter, "nodes_update_norm", point="min") == 1.0
    assert value(exporter, "nodes_user_f1_score", point="median") == 0.25
    assert value(exporter, "rounds_total") == 3
    assert value(exporter, "findings_total", severity="critical", issue="UPDATE_TOO_LARGE") == 3
    assert value(exporter, "node_failures_total", node="c2") == 3
    assert value(exporter, "transfer_bytes_total", kind="update") == 900
    assert value(exporter, "transfer_raw_bytes_total", kind="update") == 3600
    assert value(exporter, "records_lost_total") == 3
    assert value(exporter, "run_open") == 0
    assert ("fedvitals_run_info", (("host", "lab"), ("id", RUN), ("run", "digits"), ("topology", "star"))) in scraped(
        exporter
    )


def test_what_comes_twice_counts_once(exporter):
    """A batch that is delivered again changes no counter."""
    exporter.write(small())
    before = scraped(exporter)
    exporter.write(small())
    assert scraped(exporter) == before


def test_the_spread_is_of_a_round_that_is_over(exporter):
    """Half a round is not shown as if it were one."""
    exporter.write([run_of(), *round_of(0, clients=4)])
    halfway = [record for record in round_of(1, clients=4) if record.where.node in ("c0", "c1")]
    exporter.write([m for m in halfway if isinstance(m, Metric)])
    assert value(exporter, "nodes_loss", point="max") == 1.0  # of round 0
    exporter.write(round_of(1, clients=4))
    assert value(exporter, "nodes_loss", point="max") == 0.5


def test_the_spread_is_over_the_same_values_as_the_nodes_own_series(exporter):
    """What clients are measured on in turns is there of all that took part, and of nobody who did not."""
    exporter.write([run_of()])
    for number in range(4):
        told = [Metric(Where(RUN, number, f"c{n}"), 0.0, "update.norm", 1.0) for n in range(3 if number == 3 else 4)]
        told += [Metric(Where(RUN, number, f"c{number}"), 0.0, "scale.gsc", 10.0 + number)] if number < 3 else []
        exporter.write([*told, Metric(Where(RUN, number), 1.0, "time.round", 1.0)])
    assert value(exporter, "nodes_scale_gsc", point="min") == value(exporter, "node_scale_gsc", node="c0") == 10.0
    assert value(exporter, "nodes_scale_gsc", point="median") == value(exporter, "node_scale_gsc", node="c1") == 11.0
    assert value(exporter, "nodes_scale_gsc", point="max") == value(exporter, "node_scale_gsc", node="c2") == 12.0
    told = [Metric(Where(RUN, 4, "c0"), 0.0, "update.norm", 1.0), Metric(Where(RUN, 4, "c1"), 0.0, "update.norm", 1.0)]
    nan = Metric(Where(RUN, 4, "c0"), 0.0, "scale.gsc", float("nan"))
    exporter.write([*told, nan, Metric(Where(RUN, 4), 1.0, "time.round", 1.0)])
    assert value(exporter, "nodes_scale_gsc", point="min") == value(exporter, "nodes_scale_gsc", point="max") == 11.0


def test_a_thousand_clients_stay_within_the_bound(exporter):
    """At most 2,000 series; the worst nodes are named, the others are in the spread."""
    exporter.write([run_of(), *round_of(0, clients=1000)])
    exporter.write([
        stamped(Finding(Where(RUN, 0, "c777"), 0.0, "STALE", "critical", 0.9, "late"), "x", 1),
    ])  # fmt: skip
    found = scraped(exporter)
    assert len(found) <= 2000
    named = {dict(labels)["node"] for name, labels in found if name == "fedvitals_node_update_norm"}
    assert {"c777", "c1"} <= named
    assert len(named) == 10
    assert value(exporter, "nodes_update_norm", point="p95") == pytest.approx(1.95, abs=0.01)


def test_more_nodes_than_there_is_room_for_are_not_made():
    """A bound that the user sets too high costs no scrape: who has no place is not made at all, and is counted."""
    sink = Prometheus(0, nodes=100_000, worst=100_000)
    sink.write([run_of(), *round_of(0, clients=1000)])
    made = sum(1 for kind in sink._runs[RUN].KINDS for _ in sink._runs[RUN].kind(kind))
    assert made <= 2 * 2000
    assert len(scraped(sink)) <= 2000
    sink.close()


@pytest.mark.thorough
def test_hostile_names_and_numbers_stay_within_the_bound(exporter):
    """However many names, nodes, runs and issues are told, the page keeps its bound and can be parsed."""
    for r in range(12):
        run = f"run-{r}"
        records = [run_of(run=run, name=f"n{r}\n\"'\\{{}}" + "x" * 500)]
        for i in range(400):
            where = Where(run, 0, f"node\n{i}" + "y" * 300)
            records += [Metric(where, 0.0, f"user.m{i}", 1.0), Metric(where, 0.0, "loss", float("nan"))]
            records += [Metric(Where(run, 0), 0.0, f"user.a{'.' if i % 2 else '_'}{i // 2}", 1.0)]
            records += [stamped(Finding(where, 0.0, f"I{i}\ud800", "odd", 0.5, "?"), "s", i)]
            records += [stamped(Transfer(where, 0.0, "a", "b", -5, 3, None, f"k{i}"), "t", i)]
        exporter.write([*records, Metric(Where(run, 0), 1.0, "time.round", 1.0)])
    assert len(scraped(exporter)) <= 2000
    assert ("fedvitals_series_left_out", ()) in scraped(exporter)


def test_two_runs_at_once_and_the_page_outlives_the_first(exporter):
    """One object serves several monitors; runs of the same name are told apart."""
    with ending_queues() as make:
        first, second = make(exporter), make(exporter)
        first.put_many(small())
        second.put_many(small(run="20261115-130000-fff000", clients=2))
        assert first.flush()
        assert second.flush()
        runs = {dict(labels).get("run") for _, labels in scraped(exporter)} - {None}
        assert len(runs) == 2
        assert holds_for_each(run.startswith("digits") for run in runs)
        url = exporter.url
        first.close()
        assert get(url)[0] == 200
        second.close()
        assert exporter.port is None
    with pytest.raises(urllib.error.URLError):
        get(url)


def test_names_follow_the_conventions():
    assert page_name("time.round") == "round_seconds"
    assert page_name("memory.peak") == "memory_peak_bytes"
    assert page_name("accuracy") == "accuracy_ratio"
    assert page_name("update.cosine_mean") == "update_cosine_mean"


def test_a_free_port_is_told(exporter, caplog):
    """Port 0 takes a free one; a program without logging sees it, too."""
    exporter.write([run_of()])
    assert exporter.port
    assert str(exporter.port) in caplog.text
    assert caplog.records[0].levelno == logging.WARNING
    status, body = get(exporter.url)
    assert status == 200
    assert "fedvitals_run_open" in body
    assert get(exporter.url.replace("/metrics", "/else"))[0] == 404


def test_a_port_that_is_taken_is_told_once_and_tried_again(caplog, monkeypatch):
    """Training goes on; when the port is free, the page is there, with everything told before."""
    monkeypatch.setattr("fedvitals.sinks.prometheus.sink.RETRY_SECONDS", 0.0)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with ending_queues() as make:
            sink = Prometheus(port)
            queue = make(sink)
            for record in small()[:-1]:
                queue.put(record)
            assert queue.flush()
            queue.put(round_of(3)[0])
            assert queue.flush()
            assert not queue.lost
            assert caplog.text.count("cannot be served") == 1
            assert sink.port is None
            other.close()
            queue.put(run_of(finished=True))
            assert queue.flush()
            assert sink.port == port
            assert value(sink, "rounds_total") == 3


def test_other_machines_need_a_token():
    """Without one it is refused at once; with it, only who has the token reads."""
    with pytest.raises(ConfigError, match="token"):
        Prometheus(host="0.0.0.0")
    sink = Prometheus(0, "0.0.0.0", "secret")
    sink.write([run_of()])
    url = f"http://127.0.0.1:{sink.port}/metrics"
    assert get(url)[0] == 401
    assert get(url, Authorization="Bearer wrong")[0] == 401
    assert get(url, Authorization="Bearer secret")[0] == 200
    sink.close()


def test_a_page_of_the_web_cannot_read_it(exporter):
    """One whose name was made to point to this machine sends its own name along."""
    exporter.write([run_of()])
    status, body = get(exporter.url, Host=f"evil.example:{exporter.port}")
    assert status == 403
    assert "fedvitals_" not in body
    assert get(exporter.url, Host=f"localhost:{exporter.port}")[0] == 200


def test_the_sinks_contract():
    check_sink(lambda: Prometheus(0))


def test_a_missing_package_is_said_at_once(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client.core", None)
    with pytest.raises(MissingExtraError, match=r"fedvitals\[prometheus\]"):
        Prometheus()


@pytest.mark.thorough
@available
def test_the_rules_hold_and_fire(tmp_path):
    """`promtool` accepts them, and each alert fires on a course that it is for, and not on a healthy one."""
    tool = shutil.which("promtool")
    subprocess.run([tool, "check", "rules", Prometheus.RULES], check=True, capture_output=True)

    def series(name: str, values: str, labels: str = "") -> dict[str, str]:
        return {"series": f'fedvitals_{name}{{run="r"{labels}}}', "values": values}

    ill = {
        "FedvitalsRoundTakesLong": [series("round_seconds", "4x20 30"), series("rounds_total", "5+1x30")],
        "FedvitalsClientFailing": [series("node_failures_total", "0x10 1 2 3", ',node="c7"')],
        "FedvitalsCriticalFinding": [series("findings_total", "_x20 1 1", ',severity="critical",issue="NAN_UPDATE"')],
        "FedvitalsRecordsLost": [series("records_lost_total", "0x20 5 5")],
        "FedvitalsAccuracyFell": [series("accuracy_ratio", "0.9x18 0.5 0.5 0.5 0.5")],
        "FedvitalsNoRoundEnds": [
            series("run_open", "1x30"),
            series("rounds_total", "3x30"),
            series("round_seconds", "5x30"),
            series("last_round_timestamp_seconds", "60x30"),
        ],
    }
    healthy = [
        series("round_seconds", "4 5 4 4 5x20"), series("rounds_total", "5+1x30"), series("run_open", "1x30"),
        series("last_round_timestamp_seconds", "0+60x30"), series("node_failures_total", "1x30", ',node="c7"'),
        series("findings_total", "2x30", ',severity="critical",issue="OLD"'), series("records_lost_total", "7x30"),
        series("accuracy_ratio", "0.1+0.02x30"),
    ]  # fmt: skip

    def outcome(input_series: list, alert: str, fires: bool) -> subprocess.CompletedProcess:
        # promtool compares labels exactly; an alert's own expression is asked instead for how many there are.
        expression = f'count(ALERTS{{alertname="{alert}",alertstate="firing"}})'
        samples = [{"labels": "{}", "value": 1}] if fires else []
        test = {
            "rule_files": [str(Prometheus.RULES)],
            "evaluation_interval": "1m",
            "tests": [
                {
                    "interval": "1m",
                    "input_series": input_series,
                    "promql_expr_test": [{"expr": expression, "eval_time": "21m", "exp_samples": samples}],
                }
            ],
        }
        (tmp_path / "test.yml").write_text(json.dumps(test))  # JSON is YAML
        return subprocess.run(
            [tool, "test", "rules", tmp_path / "test.yml"], capture_output=True, text=True, check=False
        )

    for alert, input_series in ill.items():
        done = outcome(input_series, alert, fires=True)
        assert done.returncode == 0, alert + done.stdout + done.stderr
        done = outcome(healthy, alert, fires=False)
        assert done.returncode == 0, "healthy " + alert + done.stdout + done.stderr


@available
@pytest.mark.thorough
def test_the_real_server_scrapes_it_and_answers(exporter, tmp_path):
    """Debian's Prometheus, started here, scrapes the page, answers a query about a client, and loads the rules."""
    exporter.write(small()[:-1])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = {
        "global": {"scrape_interval": "250ms", "evaluation_interval": "250ms"},
        "rule_files": [str(Prometheus.RULES)],
        "scrape_configs": [{"job_name": "fedvitals", "static_configs": [{"targets": [f"127.0.0.1:{exporter.port}"]}]}],
    }
    (tmp_path / "prometheus.yml").write_text(json.dumps(config))
    command = [
        shutil.which("prometheus"), f"--config.file={tmp_path / 'prometheus.yml'}",
        f"--storage.tsdb.path={tmp_path / 'data'}", f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn",
    ]  # fmt: skip
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "GOMAXPROCS": "1"})
    try:
        asked = urllib.parse.quote('fedvitals_node_update_norm{node="c1"} > 10')
        answer = _wait(lambda: _ask(port, f"/api/v1/query?query={asked}")["data"]["result"], tmp_path / "log")
        (series,) = answer
        assert series["metric"]["run"] == "digits"
        assert float(series["value"][1]) == 50.0
        alerts = _wait(lambda: _ask(port, "/api/v1/alerts")["data"]["alerts"], tmp_path / "log")
        assert "FedvitalsCriticalFinding" in {alert["labels"]["alertname"] for alert in alerts}
        (target,) = _ask(port, "/api/v1/targets")["data"]["activeTargets"]
        assert target["health"] == "up"
        assert target["lastError"] == ""
    finally:
        server.terminate()
        server.wait(PATIENCE)


def _ask(port: int, path: str) -> dict:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=PATIENCE) as answer:
        return json.load(answer)


def _wait(ask, log, seconds: float = 30.0):
    """What `ask` gives once it gives something."""
    until = time.monotonic() + seconds
    while True:
        try:
            if found := ask():
                return found
        except OSError:
            pass  # not yet listening
        assert time.monotonic() < until, log.read_text()
        time.sleep(0.1)
