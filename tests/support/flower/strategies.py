# SPDX-License-Identifier: Apache-2.0
"""Strategies that write down what they are handed."""

from support.flower.federation import (
    keys_and_bytes,
)


def recording(kind):
    """The strategy, writing down what it is handed."""

    class Recording(kind):
        def aggregate_train(self, server_round, replies):
            return super().aggregate_train(server_round, self._seen(replies))

        def aggregate_evaluate(self, server_round, replies):
            return super().aggregate_evaluate(server_round, self._seen(replies))

        def _seen(self, replies):
            replies = [*replies]
            own = [(r.metadata.src_node_id, r.metadata.message_type, keys_and_bytes(r.content)) for r in replies]
            self.__dict__.setdefault("seen", []).append(own)
            return replies

    return Recording
