"""Weights & Biases as a guest: it gets the metrics when it can, and never delays or ends a run.

wandb is imported only when it is on.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import netrc
import os
import secrets
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from async_rl.config import Config

REACH_TIMEOUT_S = 3.0
INIT_TIMEOUT_S = 20.0
FINISH_TIMEOUT_S = 30.0

Mode = Literal["online", "offline", "disabled"]


def open_wandb_run(config: Config, run_dir: Path, note: Callable[[str], None]) -> WandbRun | None:
    """The run that `logging.wandb` asks for, or None. Whatever stands in the way is told in one `note`."""
    mode, why = choose_mode(config.logging.wandb)
    if why:
        note(f"wandb: {why}")
    if mode == "disabled":
        return None
    try:
        import wandb

        run = wandb.init(
            project=config.logging.project,
            name=config.run.name,
            id=_run_id(run_dir),
            resume="allow",
            dir=str(run_dir),
            config=dataclasses.asdict(config),
            mode=mode,
            settings=wandb.Settings(
                init_timeout=INIT_TIMEOUT_S,
                finish_timeout=FINISH_TIMEOUT_S,
                finish_timeout_raises=False,
                silent=True,
                console="off",
            ),
        )
        run.define_metric("*", step_metric="step")  # wandb's own counter goes up with every line, evaluations included
    except Exception as error:  # a guest: nothing that wandb raises may end the run
        note(f"wandb: off, it did not start: {type(error).__name__}: {error}")
        return None
    return WandbRun(run, note)


def _run_id(run_dir: Path) -> str:
    """Of this run directory, so that a resumed run goes on in the same wandb run."""
    file = run_dir / "wandb_id"
    if not file.is_file():
        file.write_text(secrets.token_hex(4))
    return file.read_text()


class WandbRun:
    """Passes values on; the first failure is told once and turns it off."""

    def __init__(self, run: Any, note: Callable[[str], None]) -> None:
        self._run = run
        self._note = note
        self._failed = False

    def log(self, record: dict[str, float]) -> None:
        self._attempt(lambda: self._run.log(record))

    def alert(self, text: str) -> None:
        self._attempt(lambda: self._run.alert(title="async-rl alarm", text=text))

    def close(self) -> None:
        """Waits at most FINISH_TIMEOUT_S for uploads; the rest stays in run_dir/wandb for `wandb sync`."""
        self._attempt(self._run.finish)

    def _attempt(self, call: Callable[[], object]) -> None:
        if self._failed:
            return
        try:
            call()
        except Exception as error:  # a guest: see open_wandb_run
            self._failed = True
            self._note(f"wandb: off from here on: {type(error).__name__}: {error}")


def choose_mode(asked: Literal["auto", "online", "offline", "disabled"]) -> tuple[Mode, str]:
    """What `logging.wandb` comes to on this machine, and a line for the user if that is less than asked."""
    if asked == "disabled" or (asked == "auto" and os.environ.get("WANDB_MODE") == "disabled"):
        return "disabled", ""
    if importlib.util.find_spec("wandb") is None:
        return "disabled", "" if asked == "auto" else "off, it is not installed. Run: pip install wandb"
    if asked == "offline" or (asked == "auto" and os.environ.get("WANDB_MODE") == "offline"):
        return "offline", ""
    if not is_logged_in():
        if asked == "auto":
            return "disabled", ""
        return "offline", "offline, there is no account. Run `wandb login` or set WANDB_API_KEY."
    url = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
    if not is_reachable(url):
        return "offline", f"offline, {url} can't be reached. Send it later with `wandb sync`."
    return "online", ""


def is_logged_in() -> bool:
    """Whether the user gave wandb a key: WANDB_API_KEY, or `wandb login`, which writes netrc."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    candidates = [os.environ["NETRC"]] if "NETRC" in os.environ else ["~/.netrc", "~/_netrc"]
    for candidate in candidates:
        try:
            if netrc.netrc(os.path.expanduser(candidate)).authenticators(host):
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False


def is_reachable(url: str, timeout_s: float = REACH_TIMEOUT_S) -> bool:
    """Whether the host of `url`, or the proxy the environment sets for it, takes a TCP connection in time."""
    target = urlsplit(url)
    proxy = getproxies().get(target.scheme)
    if proxy and not proxy_bypass(target.hostname or ""):
        target = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    address = (target.hostname or "", target.port or (443 if target.scheme == "https" else 80))
    reached = threading.Event()

    def connect() -> None:
        try:
            with socket.create_connection(address, timeout=timeout_s):
                reached.set()
        except OSError:
            pass
        finally:
            done.set()

    done = threading.Event()
    # In a thread of its own, because no timeout reaches into the name look-up.
    threading.Thread(target=connect, daemon=True, name="wandb-reach").start()
    done.wait(timeout_s)
    return reached.is_set()
