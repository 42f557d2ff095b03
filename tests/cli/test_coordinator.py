"""``unisono coordinator``: its output, the requests that it answers, and how it ends."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.processes import ignoring
from unisono.cli.token import read_token
from unisono.errors import InvalidInput
from unisono.membership import CoordinatorAddress
from unisono.membership.http_client import HttpConnection
from unisono.membership.messages import HeartbeatReply, StatusMessage

TOKEN = "as long as it has to be"


@contextmanager
def coordinating(
    directory: Path, *words: str, ignored: Collection[int] = (), **environ: str
) -> Iterator[subprocess.Popen[str]]:
    given = {name: value for name, value in os.environ.items() if name != "UNISONO_TOKEN"} | environ
    command = [sys.executable, "-m", "unisono", "coordinator", *words]
    with subprocess.Popen(
        command, cwd=directory, env=given, stdout=subprocess.PIPE, text=True, preexec_fn=ignoring(*ignored)
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def url_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    said, _, url = process.stdout.readline().strip().rpartition(" ")
    assert said == "coordinator at"
    return url


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_answers_whoever_has_the_token_until_it_is_asked_to_end(number: signal.Signals, tmp_path) -> None:
    with coordinating(tmp_path) as process:
        url = url_of(process)
        assert process.stdout is not None
        said = process.stdout.readline().strip()
        file = tmp_path / said.rpartition(" ")[2]
        assert said == "its token, for --token-file of workers, is in coordinator.sqlite.token"
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        made = file.read_text().strip()
        assert made not in said
        for given, status in ((made, 200), (made[:-1], 401), ("", 401)):
            answer = HttpConnection(CoordinatorAddress(url, given)).get("/v1/status", StatusMessage)
            assert answer is not None
            assert answer.status == status
        process.send_signal(number)
        assert process.wait(20) == 0
    assert stat.S_IMODE((tmp_path / "coordinator.sqlite").stat().st_mode) == 0o600
    with coordinating(tmp_path) as process:  # again: with the same token
        answer = HttpConnection(CoordinatorAddress(url_of(process), made)).get("/v1/status", StatusMessage)
        assert answer is not None
        assert answer.status == 200
    file.chmod(0o644)
    with coordinating(tmp_path) as process:
        assert process.wait(20) == 2


def test_it_makes_a_certificate_by_whose_fingerprint_it_is_known(tmp_path: Path) -> None:
    shown = []
    for _ in range(2):
        with coordinating(tmp_path, "--make-certificate", "--state", "here", UNISONO_TOKEN=TOKEN) as process:
            url = url_of(process)
            assert process.stdout is not None
            said, _, authority = process.stdout.readline().strip().rpartition(" ")
            assert said == f"other hosts join with  unisono join {url} --authority"
            shown.append(authority)
            answer = HttpConnection(CoordinatorAddress(url, TOKEN, authority=authority)).get(
                "/v1/status", StatusMessage
            )
            assert answer is not None
            assert answer.status == 200
            by_file = CoordinatorAddress(url, TOKEN, authority=str(tmp_path / "here.certificate.pem"))
            assert HttpConnection(by_file).get("/v1/status", StatusMessage) is not None
            another = authority[:-1] + ("0" if authority[-1] != "0" else "1")
            assert (
                HttpConnection(CoordinatorAddress(url, TOKEN, authority=another)).get("/v1/status", StatusMessage)
                is None
            )
    assert shown[0] == shown[1]
    key = tmp_path / "here.key.pem"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    key.chmod(0o640)
    with coordinating(tmp_path, "--make-certificate", "--state", "here", UNISONO_TOKEN=TOKEN) as process:
        assert process.wait(20) == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_where_it_was_started_with_sigint_ignored_other_signals_end_it(number: signal.Signals, tmp_path: Path) -> None:
    with coordinating(tmp_path, ignored=[signal.SIGINT], UNISONO_TOKEN=TOKEN) as process:
        contact = CoordinatorAddress(url_of(process), TOKEN)
        process.send_signal(signal.SIGINT)
        answer = HttpConnection(contact).get("/v1/status", StatusMessage)
        assert answer is not None
        assert answer.status == 200
        process.send_signal(number)
        assert process.wait(20) == 0


def test_started_again_it_knows_the_view(tmp_path) -> None:
    (tmp_path / "token").write_text(TOKEN + "\n")
    words, port = ["--token-file", "token", "--state", "here"], "0"
    for number in (1, 2):
        with coordinating(
            tmp_path, *words, "--port", port, UNISONO_TOKEN="another one, which the file wins over"
        ) as it:
            url = url_of(it)
            port = url.rpartition(":")[2]
            answer = HttpConnection(CoordinatorAddress(url, TOKEN)).post(
                "/v1/beat", {"worker": f"w{number}", "count": 1, "ended_view": number - 1}, HeartbeatReply
            )
            assert answer is not None
            assert answer.view is not None
            assert answer.view.number == 1
            it.send_signal(signal.SIGKILL)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--min-workers", "3", "--max-workers", "2"],
            "--expected-workers = 3: not between --min-workers 3 and --max-workers 2",
        ),
        (["--min-workers", "0"], "--min-workers = 0: not a whole number from 1"),
        (["--port", "70000"], "port = 70000: above 65535"),
        (["--host", "192.0.2.1", "--certificate", "none"], "listen = 192.0.2.1:0: Cannot assign requested address"),
        (["--host", "192.0.2.1", "--make-certificate"], "listen = 192.0.2.1:0: Cannot assign requested address"),
        (["--certificate", __file__], "TLS needs a certificate and its key; give both."),
        (["--key", "nowhere"], "--key = nowhere: there is no such file"),
        (["--token", TOKEN], "--token = (nothing): there is no such option; did you mean --token-file?"),
        (["--token-file", "nowhere"], "--token-file = nowhere: cannot be read"),
        (["here"], "coordinator = here: it takes options only"),
        (["--state", "/"], "--state = /: "),
    ],
)
def test_what_cannot_work_is_refused_in_a_sentence_and_leaves_nothing(
    unisono, words, said, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    answer = unisono("coordinator", *words)
    assert answer.code == 2
    assert said in answer.err
    assert not list(tmp_path.iterdir())


def test_a_token_that_is_short_is_refused_and_not_shown() -> None:
    with pytest.raises(InvalidInput, match="16 printable ASCII characters") as refused:
        read_token({}, {"UNISONO_TOKEN": "secret"})
    assert "secret" not in str(refused.value)


def test_no_token_is_given_where_there_is_none() -> None:
    assert read_token({}, {}) == ""
