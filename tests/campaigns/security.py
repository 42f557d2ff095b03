"""A run of three workers on two hosts under attack: ``python -m tests.campaigns.security``.

Hosts are network namespaces on one bridge. Attackers are in a third one, and another user attacks on the first host.
They scan ports, send random bytes, flood with connections, make requests without the token or with wrong ones, send
endless headers, write to stores, claim names, relay messages and look for secrets. A process with the token sends the
coordinator invalid requests, and a worker that has joined sends its peers random bytes, again and again. Meanwhile, a
worker is killed, and a false coordinator asks the second host to run a command. Afterwards the checkpoints are
overwritten and opened. In the end

- the run has the weights of a run without faults on one worker, to the bit;
- the coordinator and the surviving workers have as many descriptors as at the start, and no more memory than after the
  first flood, which allocates some once;
- no attacker was admitted, no command of theirs was run, and the token was not revealed.

Needs root and the command ``ip``. The exit code is 1 if one of these fails.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from benchmarks.harness import environment

from tests.campaigns import hostile_files
from tests.campaigns.attackers import TRACE
from unisono.membership.certificate import fingerprint, with_certificate
from unisono.membership.endpoint import Endpoint

ADDRESSES = ("10.84.0.1", "10.84.0.2", "10.84.0.3")
COORDINATOR, HOSTILE = 4000, 4001
UNPRIVILEGED_USER = 65534
HOSTILE_WORKER = Path(__file__).parent / "hostile_worker"
HOSTILE_FILES = 100
MOST_GROWTH_BYTES, MOST_GROWTH_DESCRIPTORS = 64 << 20, 16
_FIRST_STEPS, _KILL = 300, 0.4  # strangers come after so many steps; a worker dies in the middle of their time
_SETTLE_SECONDS = 12.0  # the longest that a stranger is waited for is 10 s
TASK = ["digits", "--hidden", "4", "--micro-batch", "8"]


@dataclass
class Network:
    """Three hosts on one bridge."""

    names: Sequence[str]
    directory: Path
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, host: int, name: str, words: Sequence[object], **environ: str) -> subprocess.Popen[bytes]:
        """A process on that host; what it prints goes to ``<name>.log``."""
        command = ["ip", "netns", "exec", self.names[host], *map(str, words)]
        with (self.directory / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                command, cwd=self.directory, env=os.environ | environ, stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, start_new_session=True)  # fmt: skip
        self.started.append(process)
        return process

    def said(self, name: str) -> str:
        return (self.directory / f"{name}.log").read_text(errors="replace")


@contextmanager
def network(directory: Path) -> Iterator[Network]:
    """As long as the block lasts; whoever was started in it is ended."""
    names = [f"unisono-{os.getpid()}-{each}" for each in ("0", "1", "2", "bridge")]
    bridge = names[-1]
    with ExitStack() as stack:
        for name in names:
            _ip("netns", "add", name)
            stack.callback(_ip, "netns", "del", name)
        _ip("-n", bridge, "link", "add", "bridge", "type", "bridge")
        _ip("-n", bridge, "link", "set", "bridge", "up")
        for number, (name, address) in enumerate(zip(names[:-1], ADDRESSES, strict=True)):
            _ip("link", "add", "eth0", "netns", name, "type", "veth", "peer", f"port{number}", "netns", bridge)
            _ip("-n", bridge, "link", "set", f"port{number}", "master", "bridge", "up")
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                _ip("-n", name, "link", "set", link, "up")
        made = Network(names[:-1], directory)
        try:
            yield made
        finally:
            for process in made.started:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def undisturbed(directory: Path, words: Sequence[str]) -> dict[str, Any]:
    """What the run comes to on one worker of this host."""
    command = [sys.executable, "-m", "unisono", "train", *words, "--run-dir", directory / "undisturbed"]
    subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return _summary(directory / "undisturbed")


def attacked(directory: Path, words: Sequence[str], seconds: float) -> tuple[dict[str, Any], list[str]]:
    """What the same run comes to when it is attacked for so long, with figures; and what did not hold, in words."""
    token, run = secrets.token_urlsafe(32), directory / "run"
    Path(TRACE).unlink(missing_ok=True)
    unisono = [sys.executable, "-m", "unisono"]
    with network(directory) as net:
        listening = ["--workers", "2:4", "--listen", f"{ADDRESSES[0]}:{COORDINATOR}", "--certificate", "new"]
        train = net.start(0, "train", [*unisono, "train", *words, *listening, "--run-dir", run], UNISONO_TOKEN=token)
        _until(lambda: (run / "coordinator" / "contact.json").exists(), train, "the coordinator is up")
        pin = json.loads((run / "coordinator" / "contact.json").read_text())["authority"]
        join = [*unisono, "join", f"https://{ADDRESSES[0]}:{COORDINATOR}", "--authority", pin, "--task", "digits"]
        joined = net.start(1, "join", [*join, "--logs", directory / "joined"], UNISONO_TOKEN=token)
        _until(lambda: len(_members(run)) == 3 and _step(run) > _FIRST_STEPS, train, "three workers train")
        _strangers_once(net)
        before, began, first = _weighed(train, joined), time.monotonic(), _step(run)
        strangers = {
            "stranger": _strangers(net, 2, "stranger", ADDRESSES[0]),
            "stranger of host 1": _strangers(net, 2, "stranger-1", ADDRESSES[1]),
            "another user": _strangers(net, 0, "user", "127.0.0.1", "--user", str(UNPRIVILEGED_USER)),
            "member": _strangers(net, 2, "member", ADDRESSES[0], "--authority", pin, UNISONO_TOKEN=token),
        }
        _until(lambda: time.monotonic() > began + _KILL * seconds, train, "the run goes on under attack")
        killed_at = _step(run)
        _workers(train)[-1].kill()
        wrong = _hostile_coordinator(net, unisono, pin, token)
        noise = {"PYTHONPATH": str(HOSTILE_WORKER), "HOSTILE_WORKER_LOG": str(directory / "noise")}
        hostile = net.start(2, "hostile-worker", [*join, "--logs", directory / "hostile"], UNISONO_TOKEN=token, **noise)
        _until(lambda: time.monotonic() > began + seconds, train, "the run goes on under attack, and without a worker")
        last = _step(run)
        if last <= killed_at:
            wrong.append(f"no step was taken between the loss of the worker and the end of the attack: {killed_at}")
        if hostile.poll() is None:
            os.killpg(hostile.pid, signal.SIGKILL)
        noises = _lines(directory / "noise")
        if not noises:
            wrong.append(f"the hostile worker sent nothing, so it proves nothing: {net.said('hostile-worker')[-500:]}")
        reports = {}
        for name, (process, report) in strangers.items():
            for each in psutil.Process(process.pid).children(recursive=True) or [psutil.Process(process.pid)]:
                each.terminate()
            process.wait(60)
            reports[name] = json.loads(report.read_text() or "{}")
        settled = time.monotonic() + _SETTLE_SECONDS
        _until(lambda: time.monotonic() > settled, train, "strangers are forgotten")
        after = _weighed(train, joined)
        train.wait(600)
        joined.wait(60)
        wrong += [f"{name}: {each}" for name, report in reports.items() for each in report.get("broken", ["no report"])]
        wrong += [f"{name} failed: {report['failed']}" for name, report in reports.items() if report.get("failed")]
        for name, process in (("train", train), ("join", joined)):
            if process.returncode:
                wrong.append(f"{name} ended with exit code {process.returncode}: {net.said(name)[-500:]}")
            if token in net.said(name):
                wrong.append(f"{name} prints the token")
    if Path(TRACE).exists():
        wrong.append("a command of a stranger was run")
    grown = {}
    for pid in before.keys() & after.keys():
        name, memory, descriptors = before[pid]
        grown[f"{name} ({pid})"] = [after[pid][1] - memory, after[pid][2] - descriptors]
        if after[pid][1] - memory > MOST_GROWTH_BYTES or after[pid][2] - descriptors > MOST_GROWTH_DESCRIPTORS:
            wrong.append(
                f"{name} has grown by {after[pid][1] - memory} bytes and {after[pid][2] - descriptors} descriptors"
            )
    wrong += hostile_files.attack(run, directory, HOSTILE_FILES)
    figures = {
        "seconds": seconds,
        "steps in this time": [first, killed_at, last],
        "grown": grown,
        "views": sum(each["event"] == "view" for each in _events(run)),
        "noise of the hostile worker": len(noises),
        "done": {name: each.get("done") for name, each in reports.items()},
    }
    return {**_summary(run), "attack": figures}, wrong


def _strangers(
    net: Network, host: int, name: str, address: str, *more: str, **environ: str
) -> tuple[subprocess.Popen[bytes], Path]:
    report = net.directory / f"{name}.json"
    words = [sys.executable, "-m", "tests.campaigns.attackers", "--address", address, "--coordinator", COORDINATOR]
    # As another user, it is to find this package all the same.
    return net.start(host, name, [*words, "--report", report, *more], PYTHONPATH=str(Path.cwd()), **environ), report


def _strangers_once(net: Network) -> None:
    """All attacks of one stranger once."""
    process, report = _strangers(net, 2, "first", ADDRESSES[0], "--rounds", "1")
    process.wait(300)
    assert json.loads(report.read_text())["done"]["rounds"] == 1
    time.sleep(_SETTLE_SECONDS)


def _hostile_coordinator(net: Network, unisono: Sequence[str], pin: str, token: str) -> list[str]:
    """What went wrong when the second host was sent to a coordinator of a stranger."""
    theirs = net.directory / "theirs"
    theirs.mkdir()
    with_certificate(Endpoint(ADDRESSES[2], create_certificate=True), theirs / "certificate.pem", theirs / "key.pem")
    assert fingerprint(theirs / "certificate.pem") != pin
    words = [sys.executable, "-m", "tests.campaigns.attackers", "--serve", theirs, "--coordinator", HOSTILE]
    served = net.start(2, "hostile", [*words, "--report", theirs / "heard"], PYTHONPATH=str(Path.cwd()))
    _until(lambda: (theirs / "heard").exists(), served, "the hostile coordinator is up")
    wrong = []
    for number, (scheme, authority) in enumerate((("https", pin), ("https", "system"), ("http", "none"))):
        where = [*unisono, "join", f"{scheme}://{ADDRESSES[2]}:{HOSTILE}", "--task", "digits"]
        known = [] if authority == "system" else ["--authority", authority]
        process = net.start(1, f"lured-{number}", [*where, *known], UNISONO_TOKEN=token)
        if process.wait(120) != 2:
            wrong.append(f"a hostile coordinator by {scheme} is believed: {net.said(f'lured-{number}')[-500:]}")
    heard = (theirs / "heard").read_bytes()
    if token.encode() in heard:
        wrong.append("a hostile coordinator was told the token")
    if b"/v1/challenge" not in heard:
        wrong.append("the hostile coordinator heard nothing at all, so it proves nothing")
    return wrong


def _weighed(*commands: subprocess.Popen[bytes]) -> dict[int, tuple[str, int, int]]:
    """Title, memory and descriptors of the coordinator and of every worker."""
    found = {}
    for command in commands:
        for process in psutil.Process(command.pid).children(recursive=True):
            with suppress(psutil.Error):
                title = " ".join(process.cmdline())
                if "coordinator" in title or "worker" in title or "server" in title:
                    found[process.pid] = (title, process.memory_info().rss, process.num_fds())
    return found


def _workers(command: subprocess.Popen[bytes]) -> list[psutil.Process]:
    found = [each for each in psutil.Process(command.pid).children(recursive=True) if each.is_running()]
    return [
        each for each in found if " worker" in " ".join(each.cmdline()) and "server" not in " ".join(each.cmdline())
    ]


def _events(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in _lines(run / "events.jsonl") if line.endswith("}")]


def _lines(path: Path) -> list[str]:
    with suppress(FileNotFoundError):
        return path.read_text().splitlines()
    return []


def _step(run: Path) -> int:
    return max((each["step"] for each in _events(run) if each["event"] == "step"), default=0)


def _members(run: Path) -> Sequence[str]:
    views = [each["members"] for each in _events(run) if each["event"] == "view"]
    return views[-1] if views else []


def _summary(run: Path) -> dict[str, Any]:
    found: Mapping[str, Any] = json.loads((run / "summary.json").read_text())
    return {name: found[name] for name in ("weights_sha256", "steps", "samples", "wall_seconds")}


def _until(true: Callable[[], bool], process: subprocess.Popen[bytes], what: str, seconds: float = 3600.0) -> None:
    until = time.monotonic() + seconds
    while True:
        if process.poll() is not None or time.monotonic() > until:
            raise SystemExit(f"it did not come about that {what} (exit code {process.returncode})")
        if true():
            return
        time.sleep(0.2)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000, help="of each run, enough for the attack (20000)")
    parser.add_argument("--seconds", type=float, default=600, help="of the attack (600)")
    parser.add_argument("--sync", nargs="*", default=["AllReduce()", "ParameterServer()"])
    parser.add_argument("--directory", type=Path, help="for logs and runs, which then stay (a temporary one)")
    parser.add_argument("--to", type=Path, metavar="FILE", help="for instance benchmarks/results/security.json")
    asked = parser.parse_args()
    if os.geteuid() != 0 or not shutil.which("ip"):
        raise SystemExit("network namespaces need root and the command ip")
    found, failed = {}, False
    for sync in asked.sync:
        with tempfile.TemporaryDirectory() as place:
            directory = Path(place) if asked.directory is None else asked.directory / sync.strip("()")
            directory.mkdir(parents=True, exist_ok=True)
            words = [*TASK, "--steps", str(asked.steps), "--compress", "Exact()", "--sync", sync]
            alone = undisturbed(directory, words)
            came, wrong = attacked(directory, words, asked.seconds)
        if came["weights_sha256"] != alone["weights_sha256"]:
            wrong.append("the weights are others than those of an undisturbed run")
        print(json.dumps({"sync": sync, **came, "wrong": wrong}, indent=1), flush=True)
        found[sync] = {**came, "wrong": wrong}
        failed = failed or bool(wrong)
    if asked.to:
        asked.to.write_text(json.dumps({"environment": environment(), "runs": found}, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
