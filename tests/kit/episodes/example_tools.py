"""Tools as a user writes them."""

from __future__ import annotations

import asyncio
import time
from typing import Literal


def add(a: int, b: int = 0) -> int:
    """Add two whole numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


async def weather(city: str, unit: Literal["C", "F"] = "C") -> dict[str, str]:
    """Tell the weather of a city.

    Args:
        city: The name of the city.
        unit: The unit of the temperature.
    """
    await asyncio.sleep(0.05)
    return {"city": city, "temperature": f"21 {unit}"}


def block(seconds: float) -> str:
    """Block a thread.

    Args:
        seconds: How long.
    """
    time.sleep(seconds)
    return "done"


def fail(text: str) -> str:
    """Fail.

    Args:
        text: The error.
    """
    raise ValueError(text)


class Notebook:
    """Notes of one episode."""

    def __init__(self) -> None:
        self._notes: list[str] = []

    def write(self, note: str) -> str:
        """Write a note.

        Args:
            note: The note.
        """
        self._notes.append(note)
        return "written"

    def read(self) -> list[str]:
        """Read all notes."""
        return self._notes


def undescribed(a: int) -> int:
    return a


NOT_A_TOOL = 5


class Library:
    """A class whose constructor wants an argument."""

    def __init__(self, folder: str) -> None:
        self._folder = folder


class Offline:
    """A class that can't be created."""

    def __init__(self) -> None:
        raise ConnectionError("no such service")
