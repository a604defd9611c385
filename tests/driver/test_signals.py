from __future__ import annotations

import os
import signal

import pytest

from async_rl.driver.signals import StopSignals


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_raises_unless_it_is_deferred(number: signal.Signals) -> None:
    with StopSignals() as interrupts:
        with pytest.raises(KeyboardInterrupt):
            send(number)
        assert not interrupts.at_once
    with StopSignals() as interrupts, interrupts.deferred():
        send(number)
        assert interrupts.requested
        assert not interrupts.at_once


def test_the_second_signal_always_raises_and_later_ones_do_not_disturb_the_end() -> None:
    with StopSignals() as interrupts, interrupts.deferred():
        send(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
        assert interrupts.at_once
        send(signal.SIGINT)
        send(signal.SIGTERM)


def test_handlers_put_in_meanwhile_are_replaced_and_the_first_ones_come_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals() as interrupts:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        interrupts.install()
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before
