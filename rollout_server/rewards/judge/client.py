"""The client of a judge: sends chats to endpoints like OpenAI's, and waits out their limits and outages.

    429, Retry-After           all workers of the host wait as long as the endpoint asks for
    408, 425, 429, 5xx, a      the request is sent again, to another endpoint if there is one, for judge.patience_s
    broken connection, a       after its first failure, or after a Retry-After first held it back; then the judge has
    timeout, no JSON           no verdict. Its pauses grow with each 429, and while nobody gets an answer
    401, 403, 404, 405         the reward fails, because every request would
    another 4xx                no verdict on this answer, e.g. because it is too long for the model
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp

from async_rl.config import Config
from async_rl.errors import ConfigError, RewardError
from async_rl.network import authorization
from rollout_server.rewards.judge.rate_limit import RateLimit

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 15.0
"""The mean pause after the first failure of a request, and the longest one."""
_TOO_MANY = 429
"""The HTTP status that asks for fewer requests."""
_PASSING = (408, 425, 429)
"""The HTTP statuses below 500 after which the same request may succeed."""
_HOPELESS = (401, 403, 404, 405)
"""The HTTP statuses that no other request would get round."""


class NoVerdictError(Exception):
    """The judge has given no reply; the message says why."""


class _PassingError(Exception):
    """The endpoint could not answer now. `retry_after_s` is how long it wants to be left alone, 0 if it did not say."""

    def __init__(self, text: str, retry_after_s: float = 0.0, *, is_too_many: bool = False) -> None:
        super().__init__(text)
        self.retry_after_s = retry_after_s
        self.is_too_many = is_too_many
        """Whether the endpoint asks for fewer requests."""


Counts = dict[str, float]
"""The costs of calls: requests, retries, prompt_tokens, completion_tokens, and limited_s, the seconds for which the
rate limit held them back."""


@dataclass(frozen=True, slots=True)
class JudgeReply:
    """The text of a reply, and what it has cost."""

    text: str
    counts: Counts
    is_cut_off: bool = False
    """Whether it ended because it had as many tokens as it may have."""


def pause_s(serious: int) -> float:
    """Return for how long a request waits before it is sent again: twice as long with each failure that says something
    of the endpoint, `serious` of them so far, and not the same for all requests.
    """
    return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** max(0, serious - 1)) * random.uniform(0.5, 1.5)


def summed(counts: Iterable[Counts]) -> Counts:
    """Return the sum of each count."""
    total: Counts = {}
    for name, number in (item for each in counts for item in each.items()):
        total[name] = total.get(name, 0.0) + number
    return total


class JudgeClient:
    """Asks the endpoints of `judge` in one event loop, at most judge.concurrency requests at once."""

    def __init__(self, config: Config, session: aiohttp.ClientSession, limit: RateLimit) -> None:
        self._judge = config.judge
        self._session = session
        self._limit = limit
        self._places = asyncio.Semaphore(config.judge.concurrency)
        self._models = dict.fromkeys(config.judge.urls, config.judge.model)
        """[address] the model that requests name; empty: the endpoint is asked first."""
        self._open: Counter[str] = Counter()
        """[address] the requests that are under way."""
        self._replies = 0
        """The replies so far, to all requests."""

    async def ask(self, body: Mapping[str, Any]) -> JudgeReply:
        """Return the judge's reply to the body of a chat completion.

        Raises:
            NoVerdictError: the endpoint refused this request, or did not answer for judge.patience_s, in which the time
                counts for which a Retry-After held the request back, but not the waits for the ordinary rate.
            RewardError: no request can succeed.
        """
        patience_s, clock = self._judge.patience_s, asyncio.get_running_loop().time
        deadline_s: float | None = None
        failed, problem, retries, limited_s = "", "", 0, 0.0
        serious = 0  # the failures that say something of the endpoint, not of this request alone
        while True:
            replies = self._replies
            try:
                async with asyncio.timeout_at(deadline_s) as limit:
                    limited_s += await self._limit.acquire()
                    if self._limit.is_blocked():
                        problem = problem or "a Retry-After held the request back"
                        deadline_s = deadline_s or clock() + patience_s
                        limit.reschedule(deadline_s)
                        limited_s += await self._limit.wait_out_block()
                        if not retries:  # once it is let through, it has its whole judge.timeout_s
                            limit.reschedule(None)
                    async with self._places:
                        url = self._choose(failed)
                        reply = await self._post(url, body)
                self._replies += 1
                spent = {"requests": retries + 1.0, "retries": float(retries), "limited_s": limited_s}
                return replace(reply, counts={**reply.counts, **spent})
            except TimeoutError:
                if not limit.expired():
                    raise
                told = f"for {patience_s:g} s (judge.patience_s): {problem}"
                raise NoVerdictError(f"the judge did not answer {told}") from None
            except _PassingError as error:
                failed, problem = url, f"{url}: {error}"
                self._models[url] = self._judge.model
                if error.retry_after_s:
                    self._limit.block(min(error.retry_after_s, patience_s))
                serious += error.is_too_many or self._replies == replies
            deadline_s = deadline_s or clock() + patience_s
            retries += 1
            await asyncio.sleep(min(pause_s(serious), max(0.0, deadline_s - clock())))

    def _choose(self, failed: str) -> str:
        """Return the endpoint with the fewest requests under way, another one than `failed` if there is another."""
        urls = [url for url in self._models if url != failed] or list(self._models)
        return min(urls, key=self._open.__getitem__)

    async def _post(self, url: str, body: Mapping[str, Any]) -> JudgeReply:
        """Return the reply to one request, with the tokens that it has cost."""
        self._open[url] += 1
        try:
            model = self._models[url] or await self._model_of(url)
            answered = await self._request("POST", f"{url}/chat/completions", {"model": model, **body})
        finally:
            self._open[url] -= 1
        try:
            choice = answered["choices"][0]
            text = _text_of(choice["message"]["content"])
        except (KeyError, IndexError, TypeError):
            raise NoVerdictError(f"the judge's reply has no text: {json.dumps(answered)[:200]}") from None
        return JudgeReply(text, _tokens_of(answered.get("usage")), choice.get("finish_reason") == "length")

    async def _model_of(self, url: str) -> str:
        """Return the first model that an endpoint lists."""
        listed = await self._request("GET", f"{url}/models", None)
        try:
            self._models[url] = str(listed["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise RewardError(f"the judge at {url}/models lists no model: set judge.model") from None
        return self._models[url]

    async def _request(self, method: str, url: str, body: Any) -> dict[str, Any]:
        try:
            async with self._session.request(method, url, json=body) as response:
                text, status = await response.text(errors="replace"), response.status
                wanted_s = _retry_after_s(response.headers.get("Retry-After", ""))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _PassingError(f"{type(error).__name__} {error}".strip()) from None
        told = f"HTTP {status}: {text[:300]}"
        if status in _HOPELESS:
            hint = "judge.api_key_variable" if status in (401, 403) else "judge.urls and judge.model"
            raise RewardError(f"the judge at {url} refuses all requests, see {hint}: {told}")
        if status >= 500 or status in _PASSING:
            raise _PassingError(told, wanted_s, is_too_many=status == _TOO_MANY)
        if status != 200:
            raise NoVerdictError(f"the judge refused the request: {told}")
        try:
            answered = json.loads(text)
        except ValueError:
            raise _PassingError(f"not JSON: {text[:200]}") from None  # such as the page of a gateway
        if not isinstance(answered, dict):
            raise _PassingError(f"not an object in JSON: {text[:200]}")
        return answered


@asynccontextmanager
async def open_client(config: Config) -> AsyncIterator[JudgeClient]:
    """Open the client of one worker.

    Raises:
        ConfigError: there is no endpoint, or the variable of its key is not set.
    """
    judge, placement = config.judge, config.placement
    if not judge.urls:
        raise ConfigError(
            f"judge.urls must name an endpoint, got none; only `async-rl train` starts servers of judge.path "
            f"{judge.path!r}"
        )
    num_hosts = placement.rollout.nodes or placement.learner.nodes
    limit = RateLimit(config.run_dir, judge.requests_per_minute / num_hosts)
    try:
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=judge.timeout_s),
            headers=authorization(config.network) if judge.path else _key(judge.api_key_variable),
        ) as session:
            yield JudgeClient(config, session, limit)
    finally:
        limit.close()


def _text_of(content: Any) -> str:
    """Return the text of a message, whose content is a text, a list of parts of which some are texts, or None.

    TypeError: it is something else.
    """
    if isinstance(content, list):
        return "".join(part["text"] for part in content if "text" in part)
    if not isinstance(content, str | None):
        raise TypeError
    return content or ""


def _tokens_of(usage: Any) -> Counts:
    """Return the tokens that an endpoint says a reply has cost; 0 where it does not say."""
    told = usage if isinstance(usage, dict) else {}
    found = {key: told.get(key) for key in ("prompt_tokens", "completion_tokens")}
    return {key: float(number) if isinstance(number, int | float) else 0.0 for key, number in found.items()}


def _key(variable: str) -> dict[str, str]:
    """Return the header with the key in an environment variable; {} without a variable."""
    if variable and not os.environ.get(variable):
        raise ConfigError(f"judge.api_key_variable: the variable {variable} is not set where the rollout workers run")
    return {"Authorization": f"Bearer {os.environ[variable]}"} if variable else {}


def _retry_after_s(header: str) -> float:
    """Return the seconds of a Retry-After header, which has a number or a date; 0 if it has neither."""
    try:
        return max(0.0, float(header))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(header).timestamp() - time.time())
    except ValueError:
        return 0.0
