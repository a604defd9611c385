"""The date that a chat template writes, wherever the program applies one."""

from __future__ import annotations

from datetime import datetime

TEMPLATE_DATE = datetime(2024, 7, 26)
"""Llama's template would write today's, so that a prompt would differ tomorrow, and a group could at midnight."""
