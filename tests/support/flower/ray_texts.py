# SPDX-License-Identifier: Apache-2.0
"""What Flower's simulation says of an exception in a client: captured from flwr 1.41 on Ray 2.55, with fewer frames."""

from __future__ import annotations

import logging

ACTOR = "\x1b[36mray::ClientAppActor.run()\x1b[39m (pid=7690, ip=192.0.2.2, actor_id=8832dbaca6d5fceab585c66c01000000)"


class ClientTaskError(Exception):
    """Stands for ray.exceptions.RayTaskError, which is an exception whose text is that of the client's traceback."""


def text_of(raised: str) -> str:
    """The text of a RayTaskError(ClientAppException). `raised`: the last lines of the client's traceback."""
    words = raised.rpartition("\n\n")[2].partition(": ")[2]
    return (
        f"{ACTOR}\n"
        '  File "/site-packages/flwr/clientapp/client_app.py", line 161, in __call__\n'
        "    return self._registered_funcs[full_name](message, context)\n"
        "           ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^\n"
        '  File "/app/client_app.py", line 15, in train\n'
        "    raise_it()\n"
        f"{raised}\n"
        "\nThe above exception was the direct cause of the following exception:\n\n"
        f"{ACTOR}\n"
        '  File "/site-packages/flwr/simulation/ray_transport/ray_actor.py", line 65, in run\n'
        "    raise ClientAppException(str(ex)) from ex\n"
        "flwr.clientapp.client_app.ClientAppException: \n"
        f"Exception ClientAppException occurred. Message: {words}"
    )


def error_reply_of(raised: str) -> str:
    """The reason in the error reply."""
    return f"<class 'ray.exceptions.RayTaskError(ClientAppException)'>:<'{text_of(raised)}'>"


def log_error_of(raised: str) -> None:
    """The three lines that Flower logs in the server's process."""
    logger = logging.getLogger("flwr")
    logger.error("An exception was raised when processing a message by %s", "RayBackend")
    logger.error(ClientTaskError(text_of(raised)))
    logger.error("Traceback (most recent call last):\n  File ...\n" + text_of(raised))  # noqa: G003 - as Flower does
