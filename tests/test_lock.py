"""The lock of a session: who has it, for how long one waits, and what becomes of a signal meanwhile."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

from instrument.sessions.exporting import SessionLock


def test_a_signal_to_its_holder_is_sent_again_when_the_outermost_lets_go() -> None:
    lock, seen = SessionLock(), []

    def handle(number: int, frame: FrameType | None) -> None:
        seen.append(lock.postpone_signal(number))

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with lock.acquire_within():
            with lock.acquire_within():
                os.kill(os.getpid(), signal.SIGUSR1)
            assert seen == [True]
        assert seen == [True, False]  # sent again, and not put off now
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_signal_to_a_thread_that_does_not_hold_it_is_not_put_off() -> None:
    lock, busy, done = SessionLock(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock.acquire_within():
            busy.set()
            done.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    assert busy.wait(60)
    assert not lock.postpone_signal(signal.SIGUSR1)
    with lock.acquire_within(0.01) as held:
        assert not held
    done.set()
    holder.join()
    with lock.acquire_within(0.01) as held:
        assert held
