"""``unisono join`` and ``unisono status``, and the coordinator options of ``unisono train``."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import pytest

from tests.support.coordinator import TOKEN as THEIRS
from tests.support.coordinator import running_coordinator
from unisono.cli.status import heading
from unisono.membership import CoordinatorAddress, StateVersion, View, ViewStatus
from unisono.membership import contact_file as card
from unisono.membership.endpoint import CoordinatorOptions, Endpoint
from unisono.membership.http_client import HttpConnection
from unisono.membership.messages import HeartbeatReply

TOKEN = "as long as it has to be"

PIN = f"sha256:{'0123456789abcdef' * 4}"


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_TOKEN", TOKEN)


@pytest.mark.parametrize(
    ("line", "coordinator"),
    [
        ("", None),
        ("--listen 10.0.0.1 --certificate none", CoordinatorOptions(Endpoint("10.0.0.1"), TOKEN)),
        ("--listen localhost", CoordinatorOptions(Endpoint("localhost"), TOKEN)),
        ("--listen=[::]:4000 --certificate=none", CoordinatorOptions(Endpoint("::", 4000), TOKEN)),
        (f"--listen here:1 --certificate none --authority {__file__}",
         CoordinatorOptions(Endpoint("here", 1), TOKEN, __file__)),
        ("--listen 10.0.0.1 --certificate new",
         CoordinatorOptions(Endpoint("10.0.0.1", create_certificate=True), TOKEN)),
        (f"--coordinator https://here:4 --authority {PIN}",
         CoordinatorOptions(existing=CoordinatorAddress("https://here:4", TOKEN, authority=PIN))),
        ("--coordinator https://here:4", CoordinatorOptions(existing=CoordinatorAddress("https://here:4", TOKEN))),
        ("--coordinator http://here:4 --authority none",
         CoordinatorOptions(existing=CoordinatorAddress("http://here:4", TOKEN))),
        ("--coordinator http://[::1]:4", CoordinatorOptions(existing=CoordinatorAddress("http://[::1]:4", TOKEN))),
        (f"--listen a --certificate {__file__} --key {__file__}",
         CoordinatorOptions(Endpoint("a", 0, Path(__file__), Path(__file__)), TOKEN)),
    ],
)  # fmt: skip
def test_where_the_coordinator_is_reaches_the_run(unisono, played, line, coordinator) -> None:
    said = unisono("train", "digits", *line.split())
    assert said.code == 0, said.err
    assert played.coordinator == coordinator
    assert played.settings == {}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("train digits --listen :4000", "--listen = :4000: not an address"),
        ("train digits --listen a:70000", "port = 70000: above 65535"),
        ("train digits --key nowhere --listen a", "--key = nowhere: there is no such file"),
        (f"train digits --key {__file__}", "no coordinator is named; add --listen HOST or --coordinator URL."),
        ("train digits --listen a --coordinator http://b:1", "--listen = a: --coordinator names a coordinator that"),
        ("train digits --listen 10.0.0.1", "plain HTTP between hosts is not encrypted"),
        ("train digits --coordinator http://here:4", "plain HTTP between hosts is not encrypted"),
        ("status http://here:4", "let the coordinator use https:// (unisono coordinator --help), or add --authority"),
        ("coordinator --host 0.0.0.0", "give --certificate FILE and --key FILE, --certificate new (one is made), "),
        (
            "join https://a:1 --authority sha256:12",
            "--authority = sha256:12: is not the fingerprint of a certificate; write",
        ),
        ("join http://127.0.0.1:1 --task a --script b", "--script = b: --task is given too"),
        ("join", "URL = (nothing): one run is needed; write unisono join URL, or --run-dir DIR."),
        ("join http://127.0.0.1:1 --workers none", "--workers = none: not a whole number from 1"),
        ("join http://127.0.0.1:1 --worker 2", "did you mean --workers?"),
        ("status", "write unisono status URL, or --run-dir DIR."),
        ("status http://127.0.0.1:1 --run-dir here", "one run is needed"),
        (
            "status --run-dir nowhere",
            "run_dir = nowhere: the run in this directory has no active coordinator; name a run that is active.",
        ),
        (
            "status http://127.0.0.1:1",
            "coordinator = http://127.0.0.1:1: no coordinator of this version responds there",
        ),
        ("status here", "coordinator = here: is not the address of a coordinator"),
    ],
)
def test_what_cannot_work_is_refused_in_a_sentence(unisono, played, line, words) -> None:
    answer = unisono(*line.split())
    assert answer.code == 2
    assert words in answer.err


def test_without_a_token_nobody_is_asked(unisono, monkeypatch) -> None:
    monkeypatch.delenv("UNISONO_TOKEN")
    answer = unisono("status", "http://127.0.0.1:1")
    assert (answer.code, "UNISONO_TOKEN = unset" in answer.err) == (2, True)


def test_status_says_who_is_here_how_far_and_what_happened(unisono, tmp_path) -> None:
    with running_coordinator(tmp_path / "state") as served:
        card.write_contact(tmp_path, CoordinatorAddress(served.url, THEIRS))
        assert unisono("status", "--run-dir", str(tmp_path)).out == "no view yet; workers: 0\n"
        line = HttpConnection(CoordinatorAddress(served.url, THEIRS))
        for worker in ("a", "b"):
            line.post("/v1/beat", {"worker": worker, "count": 1}, HeartbeatReply)
        standing = {"view": 1, "step": 1200, "digest": "x"}
        line.post("/v1/beat", {"worker": "a", "count": 2, "active_view": 1, "version": standing}, HeartbeatReply)
        line.post("/v1/beat", {"worker": "b", "count": 2, "active_view": 1, "leaving": True}, HeartbeatReply)
        line.post("/v1/beat", {"worker": "c", "count": 1}, HeartbeatReply)
        said = unisono("status", "--run-dir", str(tmp_path)).out
        told = json.loads(unisono("status", "--run-dir", str(tmp_path), "--json").out)
        line.close()
    assert said.startswith("view 1: 2 workers from step 0; ")
    assert re.search(r"a +in view 1 +1,200 +\d+\.\d s ago", said)
    assert re.search(r"b +leaving +0", said)
    assert re.search(r"c +spare +0", said)
    assert re.search(r"\d\d:\d\d:\d\d  view 1: 2 workers \(a, b\) start from step 0", said)
    assert {worker["worker"] for worker in told["workers"]} == {"a", "b", "c"}


def test_each_way_in_which_a_view_may_stand_has_words() -> None:
    view = View(2, ("a",), StateVersion(0, 7), (), (Endpoint(),))
    said = {over: heading(view, over) for over in ViewStatus}
    assert said[ViewStatus.ACTIVE] == "view 2: 1 worker from the last checkpoint; active"
    assert len(set(said.values())) == len(ViewStatus)


def test_a_coordinator_leaves_the_log_handlers_of_other_libraries_open(tmp_path) -> None:
    """As that of absl, which Keras imports: it closes the stream that it writes to."""
    closed = []

    class Handler(logging.NullHandler):
        def close(self) -> None:
            closed.append(self)

    handler = Handler()
    logging.getLogger("of another library").addHandler(handler)
    with running_coordinator(tmp_path / "state"):
        pass
    logging.getLogger("of another library").removeHandler(handler)
    assert not closed
