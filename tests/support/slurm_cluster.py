"""A Slurm cluster of two simulated nodes on this host's loopback interface."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.support.leftovers import within

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sinfo")
_CONFIGURATION = """\
ClusterName=toy
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={at}/munge.sock
CredType=cred/munge
StateSaveLocation={at}/state
SlurmdSpoolDir={at}/spool-%n
SlurmctldPidFile={at}/slurmctld.pid
SlurmdPidFile={at}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
ReturnToService=2
MpiDefault=none
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 RealMemory=1000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4 RealMemory=1000
PartitionName=all Nodes=n[1-2] Default=YES MaxTime=10
"""


@contextmanager
def cluster(at: Path) -> Iterator[dict[str, str]]:
    """The environment in which ``srun`` finds the cluster, whose files lie in `at`."""
    (at / "state").mkdir()
    (at / "key").write_bytes(secrets.token_bytes(1024))
    (at / "key").chmod(0o600)
    host = socket.gethostname().split(".")[0]
    (at / "slurm.conf").write_text(_CONFIGURATION.format(at=at, host=host, ports=_free_ports(3)))
    environ = os.environ | {"SLURM_CONF": str(at / "slurm.conf")}
    files = [f"--{name}={at}/munge.{name}" for name in ("socket", "log-file", "pid-file", "seed-file")]
    files[0] = f"--socket={at}/munge.sock"
    with ExitStack() as stack:
        for command in (
            ["munged", "--force", "--foreground", f"--key-file={at}/key", *files],
            ["slurmctld", "-D"],
            ["slurmd", "-D", "-N", "n1"],
            ["slurmd", "-D", "-N", "n2"],
        ):
            stack.enter_context(_daemon(command, environ, at))
            if command[0] == "munged":
                assert within(10, (at / "munge.sock").exists), (at / "munged.out").read_text()
        assert within(30, lambda: _idle(environ)), "the nodes did not come up"
        yield environ


@contextmanager
def _daemon(command: Sequence[str], environ: dict[str, str], at: Path) -> Iterator[None]:
    output = at / f"{command[0]}{command[-1] if command[-1].startswith('n') else ''}.out"
    with output.open("wb") as file:
        process = subprocess.Popen(command, env=environ, stdout=file, stderr=file)
    try:
        yield
    finally:
        process.terminate()
        process.wait(10)


def _idle(environ: dict[str, str]) -> bool:
    asked = subprocess.run(["sinfo", "-h", "-o", "%T %D"], env=environ, capture_output=True, text=True, check=False)
    return asked.stdout.strip() == "idle 2"


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
