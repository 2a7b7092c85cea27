# SPDX-License-Identifier: Apache-2.0
"""A session's hold on a run that is still training: going forward lets the run train on, and it waits while a person
looks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedvitals.errors import ConfigError
from fedvitals.replay.debugger.breakpoints import Hit
from fedvitals.replay.debugger.live_session import LiveSession

if TYPE_CHECKING:
    from fedvitals.replay.debugger.session import Session


class HeldRun:
    """The session's hold on its run, taken when first needed and released when the session ends."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._live: LiveSession | None = None

    @property
    def goes_on(self) -> bool:
        """Return whether the run has not ended yet."""
        return self._session.described().finished is None

    @property
    def held(self) -> int | None:
        """Return the round after which the run waits for this session; None if it does not wait."""
        return None if self._live is None else self._live.paused

    def attach(self) -> LiveSession:
        """Return the live session, attached on first use. Raises ConfigError if the run has ended."""
        if not self.goes_on:
            raise ConfigError(f"The run {self._session.run.name} has ended: there is nothing to hold up.")
        if self._live is None:
            session = self._session
            self._live = LiveSession(session.store, session.run.id, session.breakpoints)
            self._live.__enter__()
        return self._live

    def close(self) -> None:
        """Release the run, which then goes on."""
        live, self._live = self._live, None
        if live is not None:
            live.close()

    def pause(self, timeout: float | None = None) -> Hit | None:
        """Hold the run after its current round, and wait until it stands."""
        live = self.attach()
        if live.paused is not None:
            return Hit(0, live.paused, "pause", "it is held already")
        live.pause()
        return self._wait(live, timeout)

    def one_more(self, timeout: float | None = None) -> Hit | None:
        """Let the run do one more round."""
        live = self.attach()
        live.step()
        return self._wait(live, timeout)

    def until_hit(self, timeout: float | None = None) -> Hit | None:
        """Let the run go on to the next breakpoint; None: it has ended, or the time is over."""
        live = self.attach()
        live.resume()
        return self._wait(live, timeout)

    def _wait(self, live: LiveSession, timeout: float | None) -> Hit | None:
        hit = live.wait_for_hit(timeout)
        if hit is None and live.ended:
            self.close()
        return hit
