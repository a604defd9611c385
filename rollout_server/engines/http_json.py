"""One HTTP request to a rollout server with a response in JSON, for the `ServerAdmin` of engines that speak HTTP."""

from __future__ import annotations

import json
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from async_rl.base.config import Limit
from async_rl.base.errors import WaitTimeoutError, WeightSyncError


def ask(
    base_url: str, method: str, path: str, headers: dict[str, str], limit: Limit, body: dict[str, Any] | None = None
) -> Any:
    """Send one request, wait for the response, and return its JSON, or {} if the response is not JSON.

    Raises:
        WeightSyncError: the server can't be reached, or answered with another HTTP status than 200.
        WaitTimeoutError: the server did not answer within `limit`.
    """
    url = urlsplit(base_url)
    connection_type = HTTPSConnection if url.scheme == "https" else HTTPConnection
    connection = connection_type(url.netloc, timeout=limit.seconds)
    try:
        data = None if body is None else json.dumps(body)
        connection.request(method, url.path + path, data, {"Content-Type": "application/json", **headers})
        response = connection.getresponse()
        text = response.read().decode(errors="replace")
    except TimeoutError:
        raise WaitTimeoutError(f"waited {limit} for the rollout server to answer {base_url}{path}") from None
    except (OSError, HTTPException) as error:
        raise WeightSyncError(
            f"{base_url}{path}: {type(error).__name__}: {error}: is the rollout server still alive?"
        ) from error
    finally:
        connection.close()
    if response.status != 200:
        raise WeightSyncError(f"the rollout server at {base_url}{path} answered {response.status}: {text[:600]}")
    try:
        return json.loads(text)
    except ValueError:
        return {}
