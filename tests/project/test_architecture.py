# SPDX-License-Identifier: Apache-2.0
"""docs/architecture.md states the functions on the write path and on the read path; here they are traced."""

import contextlib
import io
import re

import torch
from torch.nn import functional

import fedvitals as fv
from fedvitals.cli.main import main
from fedvitals.store.dialect import Database
from fedvitals.transport.queue import Queue
from support.call_chains import chains
from support.models import make, make_data
from support.paths import ROOT

PAGE = ROOT / "docs" / "architecture.md"


def stated(path: str) -> tuple[str, ...]:
    """Return the functions that the page lists for a path («Write» or «Read»), in their order."""
    text = PAGE.read_text(encoding="utf-8")
    (block,) = re.findall(rf"^\*\*{path}\*\*.*?\n\n((?:    .*\n)+)", text, re.MULTILINE)
    return tuple(line.split()[-1] for line in block.splitlines())


def longest(traced: list[tuple[str, ...]], first: str) -> tuple[str, ...]:
    """Return the longest chain, from the named function on."""
    chain = max(traced, key=len)
    return chain[chain.index(first) :]


def a_client_of_a_run(store, on_end):
    """Train one client for a round; its end is handed to `on_end`."""
    model, (x, y) = make("mlp"), make_data()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with fv.Monitor(store, run="traced", machine=False) as monitor, monitor.round(0, model):
        client = monitor.client("c0", model, optimizer, data=(x, y), loss=functional.cross_entropy)
        client.__enter__()
        for _ in range(2):
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        on_end(lambda: client.__exit__(None, None, None))


def test_the_write_path_is_the_one_that_the_page_states(tmp_path):
    traced = []
    a_client_of_a_run(tmp_path / "runs.db", lambda end: traced.extend(chains(end, {Queue.put.__code__})))
    numbers = [chain for chain in traced if "monitor.emission:Emission.results_of_nodes" in chain]
    others = ("ScopeRecorder", "layer_tables")  # of events, and of the run
    numbers = [chain for chain in numbers if not any(other in function for function in chain for other in others)]
    chain = longest(numbers, "monitor.clients:Clients.end")
    assert chain == stated("Write"), "docs/architecture.md should list:\n" + "\n".join(f"    {f}" for f in chain)


def test_the_read_path_is_the_one_that_the_page_states(tmp_path):
    store = tmp_path / "runs.db"
    a_client_of_a_run(store, lambda end: end())

    def show():
        with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
            main(["show", "traced", "--store", str(store)])

    chain = longest(chains(show, {Database.rows.__code__}), "cli.show:command")
    assert chain == stated("Read"), "docs/architecture.md should list:\n" + "\n".join(f"    {f}" for f in chain)
