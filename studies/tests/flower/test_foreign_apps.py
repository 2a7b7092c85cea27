# SPDX-License-Identifier: Apache-2.0
"""The study of foreign apps: its two lines in other people's code, and how it reads and compares their results."""

import math

import pytest

from fedvitals_studies.flower.foreign_apps import NO_LINE, TWO_LINES, apps_in, compared, main, metrics_of
from fedvitals_studies.flower.two_lines import NoPlaceError, add_two_lines

CLIENTS = {
    "app = ClientApp()": "app = ClientApp(mods=[_fedvitals.flower.client_mod()])",
    "app = ClientApp(\n    client_fn=client_fn,\n)": "mods=[_fedvitals.flower.client_mod()])",
    "app = ClientApp(client_fn, mods=[secagg_mod])": "mods=[_fedvitals.flower.client_mod(), secagg_mod])",
    "app = ClientApp(\n    mods=[\n        a,\n    ],\n)": "mods=[_fedvitals.flower.client_mod(), \n        a,",
}
SERVERS = {
    "result = strategy.start(\n    grid=grid)": "attach(strategy, _fedvitals.Monitor('{store}')).start(",
    "parts = ServerAppComponents(strategy=strategy, config=config)": "strategy=_fedvitals.flower.attach(strategy,",
    "legacy = LegacyContext(\n    config=Config(rounds=3),\n    strategy=strategy,\n)": "strategy=_fedvitals.",
}
LOG = """
INFO :      aggregate_train: Received 3 results and 0 failures
INFO :      \t└──> Aggregated MetricRecord: {'train_loss': 0.5, 'curve': [1.0, 2e-3]}
INFO :      Strategy execution finished in 0.17s
INFO :      \t\tround 2: 0.25
INFO :      \t{'accuracy': [(0, 0.0), (1, nan)]}
"""


def app_of(folder, client, server):
    (folder / "pkg").mkdir(parents=True)
    (folder / "pyproject.toml").write_text("[tool.flwr.app]\npublisher = 'x'\n")
    (folder / "pkg" / "client_app.py").write_text(
        f'"""An app."""\n\nfrom __future__ import annotations\n\nimport os\n{client}\n'
    )
    (folder / "pkg" / "server_app.py").write_text(f"from flwr.serverapp import ServerApp\n{server}\n")
    return folder


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("client", CLIENTS)
def test_two_lines_find_their_places(client, server, tmp_path):
    app, store = app_of(tmp_path / "app", client, server), tmp_path / "runs.db"
    assert apps_in(tmp_path) == [app]
    add_two_lines(app, store)
    texts = {name: (app / "pkg" / f"{name}_app.py").read_text() for name in ("client", "server")}
    assert CLIENTS[client] in texts["client"]
    assert SERVERS[server].format(store=store) in texts["server"]
    for text in texts.values():
        compile(text, "app", "exec")


def test_without_a_place_it_says_so(tmp_path):
    with pytest.raises(NoPlaceError, match="strategy"):
        add_two_lines(app_of(tmp_path / "app", "app = ClientApp()", "loop(grid)"), tmp_path / "runs.db")


def test_results_are_the_numbers_of_the_log():
    *numbers, last = metrics_of(LOG)
    assert numbers == [0.5, 1.0, 2e-3, 2.0, 0.25, 0.0, 0.0, 1.0]
    assert math.isnan(last)


def test_results_are_compared_with_what_plain_runs_differ_by():
    assert compared([1.0, math.nan], [1.0, math.nan], [1.0, math.nan]) == "the same"
    assert compared([1.1], [1.0], [1.0]).startswith("DIFFERS by 0.091")
    assert compared([1.1], [1.0], [1.2]) == "differs by 0.091, plain runs by 0.17"
    assert compared([1.0], [1.0, 2.0], [1.0, 2.0]).startswith("DIFFERS: 1 numbers")
    assert "not comparable" in compared([], [], [])


@pytest.mark.slow
def test_an_app_runs_in_all_ways(tmp_path, capsys):
    """About three minutes: four simulations on Ray."""
    app = tmp_path / "apps" / "averaging"
    (app / "averaging").mkdir(parents=True)
    (app / "pyproject.toml").write_text(
        '[project]\nname = "averaging"\nversion = "1.0.0"\ndependencies = []\n[tool.flwr.app]\npublisher = "x"\n'
        '[tool.flwr.app.components]\nserverapp = "averaging.server_app:app"\nclientapp = "averaging.client_app:app"\n'
        "[tool.flwr.app.config]\nnum-server-rounds = 9\n"
    )
    (app / "averaging" / "__init__.py").write_text("")
    (app / "averaging" / "client_app.py").write_text(
        "from flwr.app import Message, MetricRecord, RecordDict\nfrom flwr.clientapp import ClientApp\n\n"
        "app = ClientApp()\n\n\n@app.train()\ndef train(message, context):\n"
        '    metrics = MetricRecord({"num-examples": 2, "train_loss": 0.25})\n'
        '    return Message(RecordDict({"arrays": message.content["arrays"], "metrics": metrics}), reply_to=message)\n'
    )
    (app / "averaging" / "server_app.py").write_text(
        "import numpy as np\nfrom flwr.app import ArrayRecord\nfrom flwr.serverapp import ServerApp\n"
        "from flwr.serverapp.strategy import FedAvg\n\napp = ServerApp()\n\n\n@app.main()\ndef main(grid, context):\n"
        '    strategy, rounds = FedAvg(fraction_evaluate=0.0), context.run_config["num-server-rounds"]\n'
        "    strategy.start(grid=grid, initial_arrays=ArrayRecord([np.ones(3)]), num_rounds=rounds)\n"
    )
    assert main([str(tmp_path / "apps"), "--rounds", "2", "--nodes", "2"]) == 0
    printed = capsys.readouterr().out
    for way in (TWO_LINES, NO_LINE):
        assert f"{way:10} the same; 2 rounds seen, 0 errors of ours" in printed
