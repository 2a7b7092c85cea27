# SPDX-License-Identifier: Apache-2.0
"""The same app, whose sections of rounds are alternately not monitored and monitored by fedvitals, in the same
processes.

Two runs one after the other differ by more than the cost of fedvitals: other processes, another minute. Requests tell a
client which section it is; the grid is copied, since fedvitals hooks into the one that it is given.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

import fedvitals as fv

from . import client_app
from .diary import Diary
from .server_app import averaging, rounds, warm_up

Next = Callable[[Message, Context], Message]
LETTERS = "letters.jsonl"
WATCHED = "watched"  # in the request's configuration


def _in_turn(mod: Callable[[Message, Context, Next], Message]) -> Callable[[Message, Context, Next], Message]:
    """Return the mod, active in monitored sections. It records how many bytes it adds to an update."""

    def turn(message: Message, context: Context, call_next: Next) -> Message:
        config: Any = message.content.get("config", {})
        if not config.get(WATCHED):
            return call_next(message, context)
        reply = mod(message, context, call_next)
        if reply.has_content() and reply.content.array_records and context.run_config["results"]:
            letter = sum(r.count_bytes() for name, r in reply.content.items() if name == "fedvitals")
            update = sum(r.count_bytes() for r in reply.content.array_records.values())
            line = json.dumps({"round": config["server-round"], "letter": letter, "update": update})
            with (Path(str(context.run_config["results"])) / LETTERS).open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        return reply

    return turn


client = ClientApp(mods=[_in_turn(fv.flower.client_mod())])
client.train()(client_app.train)
client.evaluate()(client_app.evaluate)
client.query()(client_app.warm_up)

server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    warm_up(grid, config)
    diary = Diary(config)
    plan: dict[str, Any] = rounds(config)
    result = None
    for block in range(int(config["blocks"])):
        watched = block % 2 == 1
        diary.about = {"block": block, "watched": watched}
        said: Any = {name: ConfigRecord({WATCHED: watched}) for name in ("train_config", "evaluate_config")}
        own, strategy = copy.copy(grid), averaging(config)
        with fv.Monitor(str(config["store"])) if watched else nullcontext() as monitor:
            strategy = strategy if monitor is None else fv.flower.attach(strategy, monitor)
            result = strategy.start(own, **plan, **said, evaluate_fn=diary.evaluate)
    diary.write(None if result is None else result.arrays)
