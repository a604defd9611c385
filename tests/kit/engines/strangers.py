"""Requests of strangers to a rollout server: a program without the key, and a web page in a browser on the host."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping

A_WEB_PAGE = {"Content-Type": "text/plain", "Origin": "https://evil.example"}
"""Headers that a page can send to another origin without asking first."""
WRONG_KEY = {"Authorization": "Bearer " + 64 * "0"}


def status_of(method: str, url: str, headers: Mapping[str, str]) -> int:
    body = b"{}" if method == "POST" else None
    request = urllib.request.Request(url, body, dict(headers), method=method)
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


def listed_routes(url: str, key: Mapping[str, str]) -> set[tuple[str, str]]:
    """Return (method, path) of all endpoints that the server describes, which it does only with the key."""
    request = urllib.request.Request(f"{url}/openapi.json", headers=dict(key))
    with urllib.request.urlopen(request, timeout=30) as response:
        paths = json.load(response)["paths"]
    routes = {(method.upper(), path) for path, methods in paths.items() for method in methods}
    return {(method, path.replace("{", "").replace("}", "")) for method, path in routes}


def answered(url: str, routes: Iterable[tuple[str, str]]) -> set[str]:
    """Return the paths at which a stranger gets another reply than a refusal."""
    return {
        path for method, path in routes for stranger in (A_WEB_PAGE, WRONG_KEY)
        if status_of(method, url + path, stranger) not in (401, 403)
    }
