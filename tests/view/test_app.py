"""The pages and their data, asked for as a browser does; and what is refused."""

from __future__ import annotations

import html
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from async_rl.view.pages import MISSING, duration
from buffer.journal.journal import FILE_NAME
from tests.kit.view.client import Client
from tests.kit.view.run_dirs import (
    CHAT_PROMPT,
    HOSTILE,
    JournalWriter,
    append_step,
    make_chat,
    make_run,
    metrics_of,
    text_group,
)

PAGES = ["/run/overview", "/run/overlap", "/run/groups", "/run/groups/1", "/run/staleness", "/run/overview/live"]


@pytest.mark.parametrize("path", PAGES)
def test_every_page_is_shown(client: Client, path: str) -> None:
    response = client.get(path)
    assert response.status_code == 200
    assert "script-src 'self'" in response.headers["content-security-policy"]


@pytest.mark.parametrize("missing", ["metrics.jsonl", "timeline.json", "status.json", "config.yaml", FILE_NAME])
def test_pages_of_a_run_that_lacks_a_file_are_shown(run_dir: Path, missing: str) -> None:
    (run_dir / missing).unlink()
    codes = {path: Client(run_dir).get(path).status_code for path in PAGES if path != "/run/groups/1"}
    assert set(codes.values()) == {200}


def test_alarms_are_told_and_signals_of_the_guard_are_on_beyond_their_limits(run_dir: Path) -> None:
    text = Client(run_dir).get("/run/overview").text
    assert "was on at step 3" in text and "has stopped learning" not in text
    record = metrics_of(12) | {"guard/cut": 0.4, "guard/gold_correlation": -0.2, "guard/rule_correlation": 0.9}
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")
    status = json.loads((run_dir / "status.json").read_text())
    (run_dir / "status.json").write_text(json.dumps(status | {"alarms": f"The run has stopped learning {HOSTILE}"}))
    text = Client(run_dir).get("/run/overview").text
    assert "The run has stopped learning" in text and HOSTILE not in text
    alarms = text.partition("Alarms and guard")[2].partition("</ul>")[0].split("<li")[1:]
    told = {" ".join(re.sub(r"<.*?>|^.*?>", " ", each).split()) for each in alarms}
    assert told == {
        "ess never on", "kl was on at step 3", "cut never on", "gold correlation on now, at 1 step so far"
    }


def test_text_of_models_and_data_is_escaped(client: Client) -> None:
    for path in ("/run/groups", "/run/groups/1", "/run/groups?text=hacked"):
        text = client.get(path).text
        assert "<script>window" not in text
        assert "<img src=x" not in text
    assert html.escape("<script>window.hacked") in client.get("/run/groups/1").text


def test_settings_and_reports_are_escaped(run_dir: Path) -> None:
    config = (run_dir / "config.yaml").read_text()
    (run_dir / "config.yaml").write_text(config.replace("path: none", "path: <script>alert(1)</script>"))
    (run_dir / "status.json").write_text(
        json.dumps({"note": HOSTILE, "time_s": 0.0, "processes": [{"doing": HOSTILE}]})
    )
    text = Client(run_dir).get("/run/overview").text
    assert "<script>alert" not in text and html.escape("<script>alert") in text
    assert "<script>window" not in text and html.escape("<script>window") in text


def test_an_answer_comes_with_versions_logprobs_and_texts(client: Client) -> None:
    answer = client.get("/run/data/answers/1/0").json()
    assert "".join(answer["pieces"]) == answer["text"] == "right answer"
    assert answer["versions"] == [1] * 6 + [2] * 6
    assert answer["old_kv"] == [0] * 6 + [1] * 6
    assert (answer["logprobs"][0], answer["logprobs"][-1], answer["trained_at"]) == (-0.1, -2.0, 3)
    assert answer["prompt_text"].startswith("question 1 ")
    assert answer["log_ratios"] == [None] + [0.5] * 11
    assert client.get("/run/data/answers/5/0").json()["log_ratios"] is None  # it was dropped


def test_without_a_tokenizer_ids_are_shown_and_the_page_says_why(run_dir: Path) -> None:
    shutil.rmtree(run_dir / "model")
    client = Client(run_dir)
    assert client.get("/run/data/answers/1/0").json()["pieces"] is None
    assert "Token ids are shown without text" in client.get("/run/groups/1").text


def test_a_depth_below_the_bound_is_told_beside_the_staleness(run_dir: Path) -> None:
    assert "depth 1.25" not in Client(run_dir).get("/run/overview").text
    config = run_dir / "config.yaml"
    config.write_text(config.read_text().replace("depth: max", "depth: 1.25"))
    assert "at most 2, depth 1.25 of 2" in Client(run_dir).get("/run/overview").text


def test_series_can_be_asked_for_from_a_line_on(run_dir: Path) -> None:
    client = Client(run_dir)
    found = client.get("/run/data/series?key=reward/mean&after=10").json()
    series = {"step": [11.0, 12.0], "value": [0.11, 0.12], "weight": [1.0, 1.0], "stride": 1}
    assert (found["series"]["reward/mean"], found["lines"]) == (series, 12)
    append_step(run_dir, 13)
    assert client.get("/run/data/series?key=reward/mean&after=12").json()["last_step"] == 13


def test_evaluations_that_are_written_after_later_steps_come_with_the_next_series(run_dir: Path) -> None:
    client, path = Client(run_dir), "/run/data/series?key=reward/mean&key=eval/accuracy&after="
    read = client.get(f"{path}0").json()["lines"]
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps({"step": step, "eval/accuracy": 0.5}) + "\n" for step in (0, 12))
    found = client.get(f"{path}{read}").json()
    assert (found["series"]["eval/accuracy"]["step"], found["series"]["reward/mean"]["step"]) == ([0.0, 12.0], [])
    assert client.get(f"{path}{found['lines']}").json()["series"]["eval/accuracy"]["step"] == []


def test_the_histogram_counts_rollouts_by_staleness(client: Client) -> None:
    found = client.get("/run/data/histogram").json()
    assert found["episodes"] == {"1": [6.0] * 12, "2": [2.0] * 12}


def test_lanes_of_a_resumed_run_begin_with_its_first_step(run_dir: Path) -> None:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    resumed = [json.loads(line) | {"time/since_first_step_s": i - 6.0 if i >= 6 else i} for i, line in enumerate(lines)]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in resumed))
    found = Client(run_dir).get("/run/data/window?from=1&to=9").json()
    assert (found["first_step"], found["last_step"]) == (7, 9)


def test_the_prediction_stands_beside_what_was_measured(client: Client) -> None:
    found = client.get("/run/data/prediction").json()
    assert found["learner"][0] == pytest.approx(0.6)
    assert 0 < found["learner"][1] <= 1


def test_there_is_no_prediction_without_enough_steps(tmp_path: Path) -> None:
    assert Client(make_run(tmp_path / "run", steps=2)).get("/run/data/prediction").json() is None


@pytest.mark.parametrize(
    "path, code, sentence",
    [
        ("/run/data/window?from=50&to=60", 400, "has nothing of the steps 50 to 60: it has the steps 1 to 12"),
        ("/run/data/window?from=9&to=3", 400, "in this order, got from=9, to=3"),
        ("/run/data/series?after=soon", 400, "after must be a whole number, at least 0"),
        ("/run/data/series?" + "key=a&" * 61, 400, "key must be given at most 60 times, got 61 keys"),
        ("/run/data/answers/77/0", 400, "are not kept"),
        ("/run/data/answers/1/9", 400, "are not kept"),
        (f"/run/data/answers/{2**63}/0", 400, "group must be a whole number"),
    ],
)
def test_bad_data_requests_get_one_sentence(client: Client, path: str, code: int, sentence: str) -> None:
    response = client.get(path)
    assert response.status_code == code
    assert sentence in response.json()["error"]


@pytest.mark.parametrize(
    "path, code, sentence",
    [
        ("/run/groups?step=three", 400, "step must be a whole number, at least 0, of at most 15 digits, got 'three'"),
        ("/run/groups?reward_min=nan", 400, "reward_min must be a number, got 'nan'"),
        ("/run/groups?order=random", 400, "order must be one of newest"),
        ("/run/groups/999", 404, "The journal has no group 999"),
        (f"/run/groups/{2**63}", 400, f"of at most 15 digits, got '{2**63}"),
        ("/run/groups?page=" + "9" * 400, 400, "9" * 80 + "..."),
        ("/run/nothing", 404, "There is no page /run/nothing"),
        ("/cells/..%2F..%2Fetc/overview", 404, "no page"),
        ("/cells/other/overview", 404, "no cell"),
        ("/sweep", 400, "a single run and not a sweep"),
        ("/static/..%2Fapp.py", 404, "no page"),
    ],
)
def test_bad_pages_get_one_sentence(client: Client, path: str, code: int, sentence: str) -> None:
    response = client.get(path)
    assert response.status_code == code
    assert sentence in html.unescape(response.text)


def test_filters_and_search_find_groups(client: Client) -> None:
    assert "/run/groups/2" in client.get("/run/groups?step=5").text
    assert "/run/groups/3" not in client.get("/run/groups?step=5").text
    assert "No group meets all of this" in client.get("/run/groups?reward_min=9").text


@pytest.mark.parametrize(
    "host, on_loopback, beyond",
    [
        ("localhost:8717", 200, 200), ("LOCALHOST", 200, 200), ("127.0.0.1", 200, 200), ("127.0.0.2:80", 200, 200),
        ("[::1]:8717", 200, 200), ("192.0.2.7:8717", 400, 200), ("[2001:db8::7]", 400, 200), ("gpu-7", 400, 200),
        ("GPU-7:8717", 400, 200), ("gpu-8", 400, 400), ("rebound.evil.example", 400, 400), ("localhost.evil", 400, 400),
    ],
)  # fmt: skip
def test_names_of_other_hosts_are_refused(run_dir: Path, host: str, on_loopback: int, beyond: int) -> None:
    """A name that points here by DNS rebinding is refused wherever the page is served; an address can't be rebound."""
    assert Client(run_dir).get("/run/overview", host=host).status_code == on_loopback
    assert Client(run_dir, is_loopback=False, names=["gpu-7"]).get("/run/overview", host=host).status_code == beyond


def test_the_chart_library_is_served_from_its_package(client: Client) -> None:
    assert client.get("/bokeh/bokeh.min.js").status_code == 200


@pytest.fixture
def chats(tmp_path: Path) -> Client:
    """A run with two episodes of tool calls, and groups that have not arrived or never did."""
    run_dir = make_run(tmp_path / "chats", groups=0)
    writer = JournalWriter(run_dir)
    writer.add(make_chat(0), step=3)
    writer.add_without_answers(1, "running")
    writer.add_without_answers(2, "dropped", "late")
    writer.add(text_group(3, ["answer"]), step=4)
    writer.close()
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps({"step": step, "episode/turns": 2.0}) + "\n" for step in (1, 2, 3, 4))
    return Client(run_dir)


def test_the_list_shows_what_the_user_said_and_why_there_is_no_text(chats: Client) -> None:
    text = chats.get("/run/groups").text
    assert ">What does a pear cost?<" in text
    assert "im_start" not in text
    assert "prompt 1, no answer has arrived yet" in text
    assert "prompt 2, no answer arrived" in text
    assert "tokens not kept" not in text


def test_a_group_that_never_arrived_has_no_version_of_arrival(chats: Client) -> None:
    for group in (1, 2):
        assert f"<dt>reached the buffer at</dt><dd>{MISSING}</dd>" in chats.get(f"/run/groups/{group}").text
    assert "its answers are being generated" in chats.get("/run/groups/1").text
    assert "it never reached the buffer" in chats.get("/run/groups/2").text


def test_a_group_shows_its_question_its_whole_prompt_and_the_episode_that_hung(chats: Client) -> None:
    text = html.unescape(chats.get("/run/groups/0").text)
    assert '<pre class="text">What does a pear cost?</pre>' in text
    assert f'<pre class="text">{CHAT_PROMPT}</pre>' in text
    assert "60.00 s outside of sampling and tool calls" in text
    assert "ran out of time after its turn 1, which called price" in text


def test_groups_are_found_by_how_their_episodes_ended(chats: Client) -> None:
    listed = chats.get("/run/groups?end=timeout").text
    assert "/run/groups/0" in listed and "/run/groups/3" not in listed
    assert "<option selected>timeout</option>" in listed
    assert "No group meets all of this" in chats.get("/run/groups?end=turns").text


def test_runs_with_episodes_have_their_charts(chats: Client, client: Client) -> None:
    assert "How episodes end" in chats.get("/run/overview").text
    assert "How episodes end" not in client.get("/run/overview").text


@pytest.mark.parametrize(
    "seconds, text",
    [(None, MISSING), (0, "0 s"), (59.6, "1 min"), (4330, "1 h 12 min"), (258_480, "2 d 23 h"), (86_400, "1 d")],
)
def test_durations_have_two_units_at_most(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


def test_the_page_of_a_group_names_its_row_and_its_errors(run_dir: Path) -> None:
    writer = JournalWriter(run_dir)
    writer.add(replace(text_group(900, ["a"]), data_row=935, left_out=("KeyError: 'plum'", f"no {HOSTILE}")))
    writer.close()
    text = Client(run_dir).get("/run/groups/900").text
    assert "<dt>row of the data</dt><dd>935</dd>" in text
    assert text.count("an episode, left out") == 2 and "KeyError: &#39;plum&#39;" in text and HOSTILE not in text
    assert "<h2>Errors</h2>" not in Client(run_dir).get("/run/groups/1").text
