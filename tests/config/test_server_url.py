"""The address of a server that runs already is checked when the configuration is read."""

from __future__ import annotations

import pytest

from async_rl.config import RolloutConfig
from async_rl.errors import ConfigError


@pytest.mark.parametrize(
    "url", ["", "http://127.0.0.1:30000", "http://127.0.0.1:30000/", "https://there", "http://[::1]:3/below"]
)
def test_the_url_of_a_server_may_be_any_address_of_http(url: str) -> None:
    assert RolloutConfig(server_url=url).server_url == url


@pytest.mark.parametrize(
    "url",
    [
        "nonsense", "there:30000", "ftp://there", "http://", "http://127.0.0.1:abc", "http://h:99999", "http://a:b@h",
        "http://h h:3", "http://127.0.0.1:3/ ", "http://h:3\n", "http://h:3/?x=1", "http://h:3/#a", "http://h:3?",
    ],
)  # fmt: skip
def test_a_url_to_which_no_request_can_be_sent_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"^rollout\.server_url"):
        RolloutConfig(server_url=url)
