"""The coordinator of a run: its address, its clients, and the run spec that joining hosts receive."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import ssl
import stat
import subprocess
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from unisono.config import Config
from unisono.errors import InvalidInput
from unisono.launch import CoordinatorProcess
from unisono.launch.coordinator_setup import coordinator_for
from unisono.membership import CoordinatorAddress, Policy
from unisono.membership.certificate import pin, with_certificate
from unisono.membership.contact_file import read_contact
from unisono.membership.endpoint import CoordinatorOptions, Endpoint
from unisono.membership.http_client import EmptyBody, HttpConnection, fetch
from unisono.membership.messages import HeartbeatReply, RunSpecMessage, StatusMessage
from unisono.run.consent import Consent
from unisono.run.elastic_run import Script, elastic_run, fetch_work, policy_of
from unisono.run.spec import PickledTask, RunSpec
from unisono.tasks.source import NamedTask

TOKEN = "as long as it has to be"
OURS = Consent(own=True)
SETTINGS = {"workers": "2:4", "compress": "Exact()"}


def order(path: Path, source: Any = None) -> RunSpec:
    (path / "logs").mkdir(exist_ok=True)
    return RunSpec(source or NamedTask("digits", {"hidden": "8"}), SETTINGS, path, 5.0)


def server(path: Path) -> Any:
    """As far as a forkserver is looked at."""
    return SimpleNamespace(rendezvous_directory=str(path))


def notices() -> tuple[list[str], Any]:
    said: list[str] = []
    return said, said.append


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_what_config_says_of_who_is_present() -> None:
    assert policy_of(Config(workers=4)) == Policy(min_workers=1, max_workers=4, expected_workers=4)
    assert policy_of(Config.of({"workers": "2:8"})) == Policy(min_workers=2, max_workers=8, expected_workers=2)
    assert policy_of(Config(workers=1, min_workers=2, max_workers=3)) == Policy(
        min_workers=2, max_workers=3, expected_workers=2
    )


def test_who_joins_is_told_what_the_others_were_and_meets_them_in_a_directory_of_its_own(tmp_path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    given, (said, told) = order(tmp_path), notices()
    with elastic_run(Config(workers=2), given, server(here), told) as elastic:
        contact = read_contact(tmp_path)
        assert contact == elastic.contact
        assert contact.rendezvous_url == f"file://{here}"
        found = fetch_work(contact, server(there), OURS)
        assert found == RunSpec(given.source, SETTINGS, tmp_path, 5.0, found.contact)
        assert found.contact == CoordinatorAddress(contact.url, contact.token, f"file://{there}")
        shutil.rmtree(here)  # as on another host
        found = fetch_work(contact, server(there), OURS)
        assert found.contact == CoordinatorAddress(contact.url, contact.token, "")
    assert said == []


def test_only_its_owner_reads_what_lies_there_and_the_way_in_goes_with_the_coordinator(tmp_path) -> None:
    with elastic_run(Config(workers=2), order(tmp_path), server(tmp_path), print):
        directory = tmp_path / "coordinator"
        assert mode(directory) == 0o700
        assert {path.name: mode(path) for path in directory.iterdir() if path.suffix in (".json", ".sqlite")} == {
            "1.sqlite": 0o600,
            "contact.json": 0o600,
        }
    with pytest.raises(InvalidInput, match="the run in this directory has no active coordinator"):
        read_contact(tmp_path)


def _view(contact: CoordinatorAddress) -> int:
    told = fetch(contact, "/v1/status", StatusMessage)
    assert told is not None
    return told.view.number


def _order(contact: CoordinatorAddress) -> RunSpecMessage:
    told = fetch(contact, "/v1/order", RunSpecMessage)
    assert told is not None
    return told


def test_each_life_of_a_run_has_a_file_of_its_own(tmp_path) -> None:
    for _ in range(2):
        with elastic_run(Config(workers=2), order(tmp_path), server(tmp_path), print) as elastic:
            assert _view(elastic.contact) == 0
            HttpConnection(elastic.contact).post("/v1/beat", {"worker": "0", "count": 1}, HeartbeatReply)
            HttpConnection(elastic.contact).post("/v1/beat", {"worker": "1", "count": 1}, HeartbeatReply)
            assert _view(elastic.contact) == 1
    assert {path.name for path in (tmp_path / "coordinator").glob("*.sqlite")} == {"1.sqlite", "2.sqlite"}


def test_a_task_that_was_carried_cannot_be_joined(tmp_path) -> None:
    source = PickledTask("mine", b"never to be opened here")
    with elastic_run(Config(workers=2), order(tmp_path, source), server(tmp_path), print) as elastic:
        assert "never" not in _order(elastic.contact).model_dump_json()
        with pytest.raises(InvalidInput, match="a task that a Python program made"):
            fetch_work(elastic.contact, server(tmp_path), OURS)


def test_a_task_that_is_not_here_is_refused_before_anything_starts(tmp_path) -> None:
    file = tmp_path / "task.py"
    file.touch()
    with elastic_run(Config(workers=2), order(tmp_path, NamedTask(f"{file}:made")), server(tmp_path), print) as elastic:
        fetch_work(elastic.contact, server(tmp_path), OURS)
        file.unlink()
        with pytest.raises(InvalidInput, match="there is no file"):
            fetch_work(elastic.contact, server(tmp_path), OURS)


def test_a_script_is_run_by_who_joins_if_it_lies_there(tmp_path) -> None:
    script, told = tmp_path / "loop.py", {"task": "", "run": str(tmp_path), "began": 1.0}
    script.touch()
    (tmp_path / "logs").mkdir()
    words = [str(script), "--lr", "1"]
    with coordinator_for(
        Policy(expected_workers=2), {**told, "script": words}, tmp_path, server(tmp_path), print
    ) as elastic:
        assert fetch_work(elastic.contact, server(tmp_path), OURS) == Script(
            script, words[1:], str(tmp_path), elastic.contact
        )
        script.unlink()
        with pytest.raises(InvalidInput, match="the run is of a script that this host does not have"):
            fetch_work(elastic.contact, server(tmp_path), OURS)


def test_a_coordinator_elsewhere_takes_one_run(tmp_path) -> None:
    policy, log = Policy(expected_workers=2, max_workers=4), tmp_path / "log"
    with CoordinatorProcess(Endpoint(), policy, tmp_path / "state", TOKEN, log, print) as coordination:
        contact = CoordinatorAddress(coordination.url, TOKEN)
        with pytest.raises(InvalidInput, match="no run has been started there yet"):
            fetch_work(contact, server(tmp_path), OURS)
        options = CoordinatorOptions(existing=contact)
        for _ in range(2):  # the same may be said again
            with elastic_run(Config(workers=2), order(tmp_path), server(tmp_path), print, options) as elastic:
                assert elastic.coordinator is None
                assert read_contact(tmp_path) == elastic.contact
        assert fetch_work(contact, server(tmp_path), OURS).settings == SETTINGS
        other = order(tmp_path, NamedTask("text"))
        with (
            pytest.raises(InvalidInput, match="it serves another run"),
            elastic_run(Config(workers=2), other, server(tmp_path), print, options),
        ):
            pass
        with pytest.raises(InvalidInput, match="the coordinator has another token"):
            fetch_work(CoordinatorAddress(coordination.url, "another"), server(tmp_path), OURS)
    with pytest.raises(InvalidInput, match="no coordinator of this version responds there"):
        fetch_work(contact, server(tmp_path), OURS)


def test_what_no_order_is_is_refused(tmp_path) -> None:
    with CoordinatorProcess(Endpoint(), Policy(), tmp_path / "state", TOKEN, tmp_path / "log", print) as coordination:
        line = HttpConnection(CoordinatorAddress(coordination.url, TOKEN))
        sound = {"task": "digits", "settings": {"steps": 3}}
        for wrong in ({}, [], {**sound, "pickled": "x"}, {**sound, "task": 5}, {**sound, "run": "x" * 5000}):
            answer = line.request("PUT", "/v1/order", wrong, EmptyBody)
            assert answer is not None
            assert answer.status == 422
        deep: dict[str, Any] = {}
        for _ in range(400):
            deep = {"x": deep}
        answer = line.request("PUT", "/v1/order", {**sound, "arguments": deep}, EmptyBody)
        assert answer is not None
        assert answer.status == 422
        answer = line.request("PUT", "/v1/order", {**sound, "settings": {"x": "x" * (1 << 20)}}, EmptyBody)
        assert answer is None or answer.status == 413


def test_a_coordinator_that_was_killed_a_thousand_times_is_started_again(tmp_path) -> None:
    notices: list[str] = []
    with CoordinatorProcess(
        Endpoint(), Policy(), tmp_path / "state", TOKEN, tmp_path / "log", notices.append
    ) as coordination:
        first, coordination._short_lifetimes = coordination.pid, 5000
        os.kill(first, signal.SIGKILL)
        coordination.on_readable()
        assert coordination.pid != first
    assert len(notices) == 1
    assert "was killed by SIGKILL" in notices[0]


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is missing")
def test_over_tls_only_whom_the_authority_vouches_for_is_believed(tmp_path) -> None:
    for name in ("ours", "theirs"):
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj",
             "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", tmp_path / f"{name}.key", "-out",
             tmp_path / f"{name}.pem"], check=True, capture_output=True)  # fmt: skip
    ours, theirs = tmp_path / "ours.pem", tmp_path / "theirs.pem"
    options = CoordinatorOptions(Endpoint(certificate=ours, key=tmp_path / "ours.key"), TOKEN, str(ours))
    with elastic_run(Config(workers=2), order(tmp_path), server(tmp_path), print, options) as elastic:
        assert elastic.contact.url.startswith("https://127.0.0.1:")
        assert _order(elastic.contact).task == "digits"
        for authority in (str(theirs), ""):
            stranger = CoordinatorAddress(elastic.contact.url, TOKEN, authority=authority)
            with pytest.raises(InvalidInput, match="its certificate is not known here"):
                fetch(stranger, "/v1/order", RunSpecMessage)
    with pytest.raises(InvalidInput, match="not a readable certificate"):
        HttpConnection(CoordinatorAddress("https://127.0.0.1:1", TOKEN, authority=str(tmp_path / "ours.key")))


def test_with_a_certificate_of_its_own_it_is_known_by_the_fingerprint_and_nobody_else_is(tmp_path) -> None:
    said, told = notices()
    options = CoordinatorOptions(Endpoint("0.0.0.0", create_certificate=True), TOKEN)
    with elastic_run(Config(workers=2), order(tmp_path), server(tmp_path), told, options) as elastic:
        url, authority = elastic.contact.url, elastic.contact.authority
        here = replace(elastic.contact, url=f"https://127.0.0.1:{url.rpartition(':')[2]}")
        assert _order(here).task == "digits"
        assert said == [
            f"other hosts join with  unisono join {url} --authority {authority} --task digits  and the token in "
            f"{tmp_path / 'coordinator' / 'contact.json'}"
        ]
        with pytest.raises(InvalidInput, match="its certificate is not known here"):
            fetch(replace(here, authority=pin(b"another")), "/v1/order", RunSpecMessage)
    assert stat.S_IMODE((tmp_path / "coordinator" / "key.pem").stat().st_mode) == 0o600


def test_whoever_answers_with_another_certificate_is_told_nothing(tmp_path) -> None:
    theirs = with_certificate(Endpoint(create_certificate=True), tmp_path / "theirs.pem", tmp_path / "theirs.key")
    context, heard = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), []
    context.load_cert_chain(str(theirs.certificate), str(theirs.key))
    with socket.create_server(("127.0.0.1", 0)) as door:

        def serve() -> None:
            wire, _ = door.accept()
            with context.wrap_socket(wire, server_side=True) as secured:
                heard.append(secured.recv(1000))

        thread = threading.Thread(target=serve)
        thread.start()
        contact = CoordinatorAddress(
            f"https://127.0.0.1:{door.getsockname()[1]}", TOKEN, authority=pin(b"the coordinator's")
        )
        with pytest.raises(InvalidInput, match="its certificate is not known here"):
            fetch(contact, "/v1/order", RunSpecMessage)
        thread.join()
    assert heard == [b""]


def test_one_that_listens_for_others_says_how_they_join(tmp_path) -> None:
    said, told = notices()
    options = CoordinatorOptions(Endpoint("0.0.0.0"), TOKEN)
    with elastic_run(Config(workers=2), order(tmp_path), server(tmp_path), told, options) as elastic:
        assert elastic.contact.rendezvous_url == ""
        assert elastic.contact.token == TOKEN
        assert said == [
            f"other hosts join with  unisono join {elastic.contact.url} --authority none --task digits  and the "
            f"token in {tmp_path / 'coordinator' / 'contact.json'}"
        ]
