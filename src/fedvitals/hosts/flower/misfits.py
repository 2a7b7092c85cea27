# SPDX-License-Identifier: Apache-2.0
"""Find replies that a strategy cannot aggregate, before it tries: another shape, other layers, unreadable bytes.

A reply is judged by the model that its client was sent, and by the other replies of the round. A reply with the form of
its request fits. One with another form fits if most others also have that form: then the app sends something other than
it was sent (adapters alone, compressed updates). If there is no usual form, nobody is named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flwr.app import Message

from fedvitals.hosts.array_models import Values
from fedvitals.hosts.flower.message_forms import ReplyForm, array_misfit, entry_misfit

if TYPE_CHECKING:
    from fedvitals.hosts.flower.server_rounds import ClientRequest

AGREEING = 2  # replies of one form that make it the usual one, if it differs from the request's


@dataclass(slots=True)
class CheckedReply:
    """A reply of a round: its form, and that of its request.

    Only set if the other replies are needed to judge it: `message`, the reply itself, and `before` and `after`, the
    trained arrays of request and reply, as far as readable.
    """

    request: ClientRequest
    key: str  # the request's id
    form: ReplyForm
    sent: ReplyForm
    message: Message | None = None
    before: dict[str, Values] | None = None
    after: dict[str, Values] | None = None

    @property
    def waits(self) -> bool:
        """Whether the other replies are needed to judge this one: its arrays are not those that its client was sent."""
        return self.form.arrays != self.sent.arrays


@dataclass(slots=True)
class ReplyChecks:
    """The replies of one phase of a round."""

    replies: list[CheckedReply] = field(default_factory=list)
    waiting: list[CheckedReply] = field(default_factory=list)
    _unfitting: set[str] = field(default_factory=set)  # ids of requests whose reply does not fit

    def add(self, reply: CheckedReply) -> None:
        """Add a reply that has arrived."""
        self.replies.append(reply)
        if reply.waits:
            self.waiting.append(reply)

    def judge(self) -> Iterator[tuple[CheckedReply, str | None]]:
        """Yield each waiting reply with the reason why it does not fit, or None if it does."""
        waiting, self.waiting = self.waiting, []
        for reply in waiting:
            why = self._misfit(reply)
            if why is not None:
                self._unfitting.add(reply.key)
            yield reply, why

    def _misfit(self, reply: CheckedReply) -> str | None:
        forms = Counter(other.form.arrays for other in self.replies if other is not reply)
        (usual, count), *_ = forms.most_common(1) or [(None, 0)]
        if count > forms.total() / 2 and (count >= AGREEING or usual == reply.sent.arrays):
            return None if usual == reply.form.arrays else array_misfit(reply.form, ReplyForm(usual))
        return array_misfit(reply.form, reply.sent) if reply.form.unreadable and not reply.sent.unreadable else None

    def entry_misfits(self) -> Iterator[tuple[CheckedReply, str]]:
        """Yield the replies whose arrays fit but whose metrics differ from most others', and how they differ."""
        for reply in self.replies:
            if reply.key in self._unfitting:
                continue
            forms = Counter(other.form.entries for other in self.replies if other is not reply)
            (usual, count), *_ = forms.most_common(1) or [(reply.form.entries, 0)]
            if count >= AGREEING and count > forms.total() / 2 and usual != reply.form.entries:
                yield reply, entry_misfit(reply.form, ReplyForm(None, usual))
