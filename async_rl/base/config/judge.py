"""The section judge of the configuration: the endpoint that the rewards `judge...` ask for verdicts."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Any

from pydantic import Field, NonNegativeFloat, PositiveInt

from async_rl.base.config.check import check
from async_rl.base.config.section import List, Named, PathText, Section, checked, section
from async_rl.base.config.system import Seconds
from async_rl.base.seams import ENGINES, EngineEntry, find_entry


def _are_urls(urls: tuple[str, ...]) -> bool:
    return all(url.startswith(("http://", "https://")) for url in urls)


@section("judge")
class JudgeConfig:
    """The judge that the rewards judge, judge_pairwise and judge_listwise ask: a model on servers of its own that the
    run starts, or a running endpoint like OpenAI's.
    """

    path: PathText = ""
    """The model that judges, on servers that the run starts (placement.judge.servers): its folder, or its name on the
    hub. Empty: the run starts none."""
    engine: Annotated[str, Named(ENGINES, "judge.engine")] = "sglang"
    """The engine of these servers, one that answers chats: sglang."""
    server_args: Section[dict[str, Any]] = field(default_factory=dict)
    """Further flags of these servers, such as {context-length: 8192}."""
    urls: Annotated[List[tuple[str, ...]], checked(_are_urls, "a list of http:// or https:// addresses")] = ()
    """Base addresses of running endpoints, up to /v1: [https://host/v1]. Requests are spread over them, and go to
    another one after a failure. With `path` the run fills them in."""
    model: str = ""
    """The model that requests name. Empty: the first that the endpoint lists."""
    api_key_variable: str = ""
    """The environment variable of the rollout workers that has the key for `urls`. Empty: no key is sent."""
    requests_per_minute: NonNegativeFloat = 0.0
    """The most requests that all workers together send in a minute. Each worker has an equal share. 0: no limit."""
    concurrency: PositiveInt = 64
    """The most requests of one worker that are under way at once."""
    timeout_s: Seconds = 60.0
    """How long the endpoint may take to answer one request."""
    patience_s: Annotated[float, Field(ge=0, le=100_000)] = 600.0
    """How long a request is sent again after its first failure. After that there is no verdict, and the answer leaves
    its group."""

    def __post_init__(self) -> None:
        check(
            not self.path or self.engine_entry.open_chat is not None, "judge.engine", self.engine,
            f"{' or '.join(name for name, entry in ENGINES.items() if entry.open_chat)} with judge.path",
            "Its servers don't answer chats.",
        )
        check(
            not self.api_key_variable or not self.path, "judge.api_key_variable", self.api_key_variable,
            "empty with judge.path", "The run makes the key of its own servers.",
        )

    @property
    def engine_entry(self) -> EngineEntry:
        """The `EngineEntry` that `engine` names."""
        return find_entry(ENGINES, self.engine, "judge.engine")
