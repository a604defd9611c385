from __future__ import annotations

import os
import signal

import pytest

from async_rl.run.processes.signals import StopSignals


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_raises_unless_it_is_deferred(number: signal.Signals) -> None:
    with StopSignals() as signals:
        with pytest.raises(KeyboardInterrupt):
            send(number)
        assert not signals.at_once
    with StopSignals() as signals, signals.deferred():
        send(number)
        assert signals.requested
        assert not signals.at_once


def test_the_second_signal_always_raises_and_later_ones_do_not_disturb_the_end() -> None:
    with StopSignals() as signals, signals.deferred():
        send(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
        assert signals.at_once
        send(signal.SIGINT)
        send(signal.SIGTERM)


@pytest.mark.parametrize("signal_first", [True, False])
def test_a_programs_request_does_not_count_for_an_end_at_once(
    signal_first: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []
    with StopSignals() as signals, signals.deferred(lambda: asked.append("end")):
        if signal_first:
            send(signal.SIGTERM)
        signals.request()
        signals.request()
        if not signal_first:
            send(signal.SIGTERM)
        assert signals.requested and not signals.at_once
        assert asked == ["end"]
        assert capfd.readouterr().err.count("Again to end at once") == (0 if signal_first else 1)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
        assert signals.at_once


def test_handlers_put_in_meanwhile_are_replaced_and_the_first_ones_come_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals() as signals:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signals.install()
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_deferred_signal_is_found_by_the_next_check(capfd: pytest.CaptureFixture[str]) -> None:
    with StopSignals() as signals, signals.deferred():
        send(signal.SIGINT)
        assert "Again to end at once" in capfd.readouterr().err
        with pytest.raises(KeyboardInterrupt):
            signals.check()
    with StopSignals() as signals, signals.deferred():
        signals.check()
        with signals.deferred(list):
            send(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signals.check()
        signals.is_heeded = True
        signals.check()


def test_a_signal_in_a_callback_of_start_up_is_not_lost() -> None:
    class Destroyed:
        def __del__(self) -> None:
            send(signal.SIGINT)

    with StopSignals() as signals, signals.deferred():
        Destroyed()  # Python would print an exception that is raised in its destructor, and drop it
        with pytest.raises(KeyboardInterrupt):
            signals.check()
