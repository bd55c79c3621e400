"""Guards of a cluster: its name is free again whatever happens, no signal cuts a clean-up short; how ranks enter."""

from __future__ import annotations

import json
import os
import signal
import threading

import pytest

from tawpipe.errors import UserError
from tawpipe_lab.cluster.enter import RankOrders
from tawpipe_lab.cluster.guard import claimed, signals_held, signals_raise

NAME = f"guard-{os.getpid()}"


def test_cluster_name_is_claimed_once_and_released_after_an_error() -> None:
    with pytest.raises(RuntimeError), claimed(NAME):
        with pytest.raises(UserError, match=rf"--name: got '{NAME}'; .*process {os.getpid()} is using"), claimed(NAME):
            pass
        with claimed(f"{NAME}-other"):
            pass
        raise RuntimeError
    with claimed(NAME):
        pass


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signals_end_a_process_after_its_clean_up(number: signal.Signals) -> None:
    before = signal.signal(number, signal.SIG_DFL)
    try:
        cleaned = []
        with pytest.raises(SystemExit) as ended, signals_raise():
            try:
                signal.raise_signal(number)
            finally:
                cleaned.append(number)
        assert ended.value.code == 128 + number and cleaned == [number]
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_existing_signal_handlers_are_kept() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        with signals_raise():
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == [signal.SIGTERM]


def test_signal_during_clean_up_takes_effect_afterwards() -> None:
    done, before = [], signal.signal(signal.SIGINT, signal.default_int_handler)  # processes of tests may ignore it
    try:
        with pytest.raises(KeyboardInterrupt), signals_held():
            signal.raise_signal(signal.SIGINT)
            done.append("all of it")
        assert done == ["all of it"]
        with signals_held():
            pass
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_signal_guards_change_nothing_outside_the_main_thread() -> None:
    found: list[object] = []

    def run() -> None:
        with signals_raise(), signals_held():
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [signal.getsignal(signal.SIGTERM)]


def test_rank_replaces_itself_by_its_command_in_the_namespace_of_its_node(monkeypatch) -> None:
    became: list[object] = []
    monkeypatch.setattr(os, "execv", lambda *words: became.extend(words))
    monkeypatch.setattr(signal, "signal", lambda *of: became.append(of))
    monkeypatch.setattr(signal, "setitimer", lambda *of: became.append(of))
    for name, value in {"GROUP_RANK": "0", "OLD": "x", "KEPT": "y"}.items():
        monkeypatch.setenv(name, value)
    entry = RankOrders("/sbin/ip", ["left", "right"], ["a", "1"], {"OLD": None, "NEW": "z"}, 2.5)
    again = RankOrders(**json.loads(entry.to_word()))
    assert again == entry
    monkeypatch.setattr(os, "environ", dict(os.environ))
    again.become()
    assert (signal.SIGPIPE, signal.SIG_DFL) in became and (signal.ITIMER_REAL, 2.5) in became
    assert became[-2:] == ["/sbin/ip", ["ip", "netns", "exec", "left", "a", "1"]]
    assert "OLD" not in os.environ and os.environ["NEW"] == "z" and os.environ["KEPT"] == "y"
