"""The lock of a session: who has it, for how long one waits, and what becomes of a signal meanwhile."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

from instrument.sessions.exporting import SessionLock


def test_signals_to_its_holder_are_sent_again_once_when_the_outermost_lets_go() -> None:
    lock, seen = SessionLock(), []

    def handle(number: int, frame: FrameType | None) -> None:
        seen.append((number, lock.postpone_signal(number)))

    numbers = [signal.SIGUSR1, signal.SIGUSR2]
    before = [signal.signal(number, handle) for number in numbers]
    postponed = [(number, True) for number in (*numbers, numbers[0])]
    try:
        with lock.acquire_within():
            with lock.acquire_within():
                for number, _ in postponed:
                    os.kill(os.getpid(), number)
            assert seen == postponed
        assert seen == [*postponed, *((number, False) for number in numbers)]  # sent again, and not put off now
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


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
