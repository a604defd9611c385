"""The client of a judge: sends chats to endpoints like OpenAI's, and waits out their outages.

    408, 425, 429, 5xx, a broken   the request is sent again, to another endpoint if there is one, for judge.patience_s
    connection, a timeout, a       after its first failure; then there is no verdict. The pauses double, and are at
    reply that is no JSON          least as long as a Retry-After in seconds
    401, 403, 404, 405             the reward fails, because every request would
    another 4xx                    no verdict on this answer, for example because it is too long for the model
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiolimiter import AsyncLimiter

from async_rl.base.config import Config
from async_rl.base.errors import ConfigError, RewardError
from async_rl.base.network import api_key

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 15.0
"""The mean pause after the first failure of a request, and the longest one."""
_PASSING = (408, 425, 429)
"""The HTTP statuses below 500 after which the same request may succeed."""
_HOPELESS = (401, 403, 404, 405)
"""The HTTP statuses that every request would get."""


@dataclass(frozen=True, slots=True)
class JudgeReply:
    """A reply and its cost, or the reason why there is none."""

    text: str | None = None
    reason: str = ""
    is_cut_off: bool = False
    """Whether it ended at max_tokens."""
    counts: dict[str, float] = field(default_factory=dict)
    """requests, retries, prompt_tokens, completion_tokens, and limited_s, the seconds that the rate limit took."""


class _RefusedError(Exception):
    """A reply with an HTTP status of 400 or more."""

    def __init__(self, status: int, text: str, retry_after: str) -> None:
        super().__init__(f"HTTP {status}: {text[:300]}")
        self.status = status
        self.wanted_s = 0.0
        """The seconds of a Retry-After header; 0 if it has none, or a date."""
        with suppress(ValueError):
            self.wanted_s = float(retry_after)


class JudgeClient:
    """Asks the endpoints of `judge` in one event loop, at most judge.concurrency requests at a time.

    Args:
        session: sends requests with the key.
        per_minute: the most requests in a minute; 0: no limit.
    """

    def __init__(self, config: Config, session: aiohttp.ClientSession, per_minute: float) -> None:
        self._judge = config.judge
        self._session = session
        self._rate = AsyncLimiter(1, 60 / per_minute) if per_minute else None
        self._places = asyncio.Semaphore(config.judge.concurrency)
        self._models: dict[str, str] = {}
        """[address] the first model that it lists."""
        self._open = Counter(dict.fromkeys(config.judge.urls, 0))
        """[address] the requests that are under way."""

    async def ask(self, body: Mapping[str, Any]) -> JudgeReply:
        """Return the reply to the body of a chat completion.

        RewardError: no request can succeed.
        """
        patience_s, clock = self._judge.patience_s, asyncio.get_running_loop().time
        deadline_s: float | None = None
        problem, failed, pause_s, has_forgotten = "", "", FIRST_PAUSE_S, False
        counts = {"requests": 0.0, "retries": 0.0, "limited_s": 0.0}
        while deadline_s is None or clock() < deadline_s:
            wanted_s = 0.0
            try:
                async with asyncio.timeout_at(deadline_s) as patience:
                    counts["limited_s"] += await self._wait_for_rate()
                    async with self._places:
                        url = min(set(self._open) - {failed} or self._open, key=self._open.__getitem__)
                        counts |= {"retries": counts["requests"], "requests": counts["requests"] + 1}
                        async with asyncio.timeout(self._judge.timeout_s):
                            answered = await self._post(url, body)
                return _read(answered, counts)
            except TimeoutError:
                if patience.expired():
                    break
                problem = f"no whole reply in {self._judge.timeout_s:g} s (judge.timeout_s)"
            except _RefusedError as error:
                problem, status, wanted_s = str(error), error.status, error.wanted_s
                if status == 404 and not has_forgotten and self._models.pop(url, ""):
                    has_forgotten = True  # it may have started again with another model
                elif status in _HOPELESS:
                    key = "judge.api_key_variable" if status in (401, 403) else "judge.urls and judge.model"
                    raise RewardError(f"the judge at {url} refuses all requests, see {key}: {problem}") from None
                elif status < 500 and status not in _PASSING:
                    return JudgeReply(reason=f"the judge refused the request: {problem}", counts=counts)
            except (aiohttp.ClientError, OSError, ValueError) as error:  # a ValueError: no JSON, as a gateway's page
                problem = f"{type(error).__name__}: {error}"
            problem, failed = f"{url}: {problem}", url
            deadline_s = deadline_s or clock() + patience_s
            pause = max(wanted_s, pause_s * random.uniform(0.5, 1.5))
            await asyncio.sleep(min(pause, max(0.0, deadline_s - clock())))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        reason = f"the judge did not answer for {patience_s:g} s (judge.patience_s): {problem}"
        return JudgeReply(reason=reason, counts=counts)

    async def _wait_for_rate(self) -> float:
        """Wait until the rate has room for a request; returns for how many seconds."""
        if self._rate is None:
            return 0.0
        clock = asyncio.get_running_loop().time
        began_s = clock()
        await self._rate.acquire()
        return clock() - began_s

    async def _post(self, url: str, body: Mapping[str, Any]) -> Any:
        """Return the JSON of one reply."""
        self._open[url] += 1
        try:
            model = self._judge.model or self._models.get(url) or await self._first_model(url)
            return await self._send("POST", f"{url.rstrip('/')}/chat/completions", {"model": model, **body})
        finally:
            self._open[url] -= 1

    async def _first_model(self, url: str) -> str:
        listed = await self._send("GET", f"{url.rstrip('/')}/models")
        try:
            self._models[url] = str(listed["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise RewardError(f"the judge at {url}/models lists no model: set judge.model") from None
        return self._models[url]

    async def _send(self, method: str, address: str, body: Mapping[str, Any] | None = None) -> Any:
        async with self._session.request(method, address, json=body) as response:
            text = await response.text(errors="replace")
            if response.status >= 400:
                raise _RefusedError(response.status, text, response.headers.get("Retry-After", "0"))
            return json.loads(text)


@asynccontextmanager
async def open_client(config: Config, per_minute: float) -> AsyncIterator[JudgeClient]:
    """Open the client of one reward of one worker.

    ConfigError: there is no endpoint, or the variable of its key is not set.
    """
    judge, variable = config.judge, config.judge.api_key_variable
    if not judge.urls:
        raise ConfigError(
            f"judge.urls must name an endpoint, got none; only `async-rl train` starts servers of judge.path "
            f"{judge.path!r}"
        )
    key = api_key(config.network) if judge.path else os.environ.get(variable, "")
    if variable and not key:
        raise ConfigError(f"judge.api_key_variable: the variable {variable} is not set where the rollout workers run")
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=judge.concurrency), timeout=aiohttp.ClientTimeout(),
        headers={"Authorization": f"Bearer {key}"} if key else {}, trust_env=not judge.path,
    ) as session:
        yield JudgeClient(config, session, per_minute)


def _read(answered: Any, counts: dict[str, float]) -> JudgeReply:
    """Return the text of a chat completion. Its content may be a list of parts, some of them texts."""
    try:
        choice = answered["choices"][0]
        content = choice["message"]["content"] or ""
        text = content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
        usage = answered.get("usage") or {}
        counts |= {key: float(usage.get(key) or 0) for key in ("prompt_tokens", "completion_tokens")}
    except (KeyError, IndexError, TypeError, AttributeError, ValueError):
        return JudgeReply(reason=f"the judge's reply has no text: {str(answered)[:200]}", counts=counts)
    return JudgeReply(text, is_cut_off=choice.get("finish_reason") == "length", counts=counts)
