"""The identity of a worker, by tables: environment variables in, identities or messages out."""

from __future__ import annotations

import pytest

from unisono.errors import InvalidInput
from unisono.launch import WorkerIdentity, identify
from unisono.launch.slurm_hostlist import counts, expand

OURS = WorkerIdentity(2, 4, 0, 2, "tcp://a:1?attempt=0", "unisono").environ()
TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "x",
    "TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_USE_AGENT_STORE": "True",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "1539309569",
    "OMPI_MCA_ess_base_jobid": "1539309569",
}  # fmt: skip
SLURM_JOB = {
    "SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_TASKS_PER_NODE": "4(x2)", "SLURM_JOB_NODELIST": "n[1-9]",
    "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0",
}  # fmt: skip
SLURM = SLURM_JOB | {
    "SLURM_STEP_ID": "1", "SLURM_STEP_NUM_TASKS": "7", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NODELIST": "n[08-10],m", "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NODEID": "2",
}  # fmt: skip
ONE_NODE = SLURM | {
    "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "n1",
    "SLURM_PROCID": "1", "SLURM_NODEID": "0",
}  # fmt: skip
ALONE = WorkerIdentity()
MPI_URL = identify(OPEN_MPI).rendezvous


@pytest.mark.parametrize(
    ("environ", "identity"),
    [
        ({}, ALONE),
        ({"MASTER_ADDR": "a", "PATH": "/bin"}, ALONE),
        (OURS, WorkerIdentity(2, 4, 0, 2, "tcp://a:1?attempt=0", "unisono")),
        (WorkerIdentity(0, 1, 0, 1, "", "unisono").environ(), WorkerIdentity(launcher="unisono")),
        (OURS | TORCHRUN | OPEN_MPI | SLURM, identify(OURS)),
        (OURS | identify(OURS).torch_environ(29500), identify(OURS)),
        (identify(OURS).torch_environ(7),
         WorkerIdentity(2, 4, 0, 2, "tcp://127.0.0.1:7?attempt=0&served=1", "torchrun")),
        (TORCHRUN, WorkerIdentity(3, 4, 1, 2, "tcp://node0:29500?attempt=2&served=1", "torchrun")),
        (TORCHRUN | OPEN_MPI | SLURM, identify(TORCHRUN)),
        (
            TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_ADDR": "::1"},
            WorkerIdentity(3, 4, 1, 2, "tcp://[::1]:29500?attempt=2", "torchrun"),
        ),
        (dict(zip(list(TORCHRUN)[:4], "0101")), WorkerIdentity(0, 1, 0, 1, "", "torchrun")),
        (OPEN_MPI, WorkerIdentity(1, 2, 1, 2, MPI_URL, "openmpi")),
        (OPEN_MPI | SLURM_JOB, identify(OPEN_MPI)),
        (OPEN_MPI | SLURM, identify(OPEN_MPI)),
        (
            OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "4", "MASTER_ADDR": "h", "MASTER_PORT": "5"},
            WorkerIdentity(1, 4, 1, 2, "tcp://h:5?attempt=0", "openmpi"),
        ),
        (SLURM, WorkerIdentity(5, 7, 1, 2, "tcp://n08:12218?attempt=0", "slurm")),
        (SLURM | {"WORLD_SIZE": "7"}, identify(SLURM)),
        (
            SLURM | {"SLURM_RESTART_COUNT": "3", "MASTER_ADDR": "h", "MASTER_PORT": "5"},
            WorkerIdentity(5, 7, 1, 2, "tcp://h:5?attempt=3", "slurm"),
        ),
        (ONE_NODE, WorkerIdentity(1, 2, 1, 2, "tcp://127.0.0.1:12218?attempt=0", "slurm")),
        (SLURM_JOB, ALONE),  # a batch script
        (SLURM_JOB | {"SLURM_STEP_ID": str(0xFFFFFFFA)}, ALONE),  # an interactive shell of salloc
    ],
)  # fmt: skip
def test_an_environment_identifies_a_worker(environ: dict[str, str], identity: WorkerIdentity) -> None:
    assert identify(environ) == identity


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


@pytest.mark.parametrize(
    ("environ", "field", "cure"),
    [
        (without(OURS, "UNISONO_RANK"), "UNISONO_RANK", "UNISONO_SIZE = 4 is set"),
        (OURS | {"UNISONO_RANK": "4"}, "UNISONO_RANK", "do not change its variables"),
        (OURS | {"UNISONO_RANK": "-1"}, "UNISONO_RANK", "write digits only"),
        (OURS | {"UNISONO_RENDEZVOUS": ""}, "UNISONO_RENDEZVOUS", "the same UNISONO_RENDEZVOUS"),
        (without(TORCHRUN, "RANK"), "RANK", "WORLD_SIZE = 4"),
        (without(TORCHRUN, "WORLD_SIZE"), "WORLD_SIZE", "RANK = 3"),
        (without(TORCHRUN, "LOCAL_RANK"), "LOCAL_RANK", "RANK = 3"),
        (without(TORCHRUN, "MASTER_ADDR"), "MASTER_ADDR", "torchrun"),
        (without(TORCHRUN, "MASTER_PORT"), "MASTER_PORT", "torchrun"),
        (TORCHRUN | {"WORLD_SIZE": "three"}, "WORLD_SIZE", "digits"),
        (TORCHRUN | {"WORLD_SIZE": "3"}, "RANK", "do not change its variables"),
        (TORCHRUN | {"LOCAL_RANK": "2"}, "LOCAL_RANK", "do not change its variables"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "5"}, "LOCAL_WORLD_SIZE", "do not change its variables"),
        (TORCHRUN | {"MASTER_PORT": "70000"}, "MASTER_PORT", "65535"),
        (TORCHRUN | {"MASTER_ADDR": "a/b"}, "MASTER_ADDR", "host of rank 0"),
        (without(OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE"), "OMPI_COMM_WORLD_LOCAL_SIZE", "is set"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "4"}, "MASTER_ADDR", "-x MASTER_ADDR="),
        (without(OPEN_MPI, "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"), "MASTER_PORT", "-x MASTER_PORT="),
        (OPEN_MPI | {"WORLD_SIZE": "8"}, "WORLD_SIZE", "unset it"),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(x2)"}, "SLURM_STEP_TASKS_PER_NODE", "srun"),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(x"}, "SLURM_STEP_TASKS_PER_NODE", "srun"),
        (SLURM | {"SLURM_STEP_NODELIST": "n[1"}, "SLURM_STEP_NODELIST", "srun"),
        (SLURM | {"SLURM_PROCID": "7"}, "SLURM_PROCID", "do not change its variables"),
        (without(SLURM, "SLURM_LOCALID"), "SLURM_LOCALID", "launcher"),
        (SLURM | {"WORLD_SIZE": "8"}, "WORLD_SIZE", "unset it"),
    ],
)
def test_what_cannot_be_is_named_with_its_cure(environ: dict[str, str], field: str, cure: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        identify(environ)
    assert caught.value.field == field
    assert cure in caught.value.cure


def test_our_own_variables_are_read_back() -> None:
    identity = WorkerIdentity(1, 3, 1, 3, "file:///tmp/x", "unisono")
    assert identify(identity.environ()) == identity


@pytest.mark.parametrize("step", [0, 1])
def test_consecutive_jobs_use_different_ports(step: int) -> None:
    environs = [ONE_NODE | {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)} for job in range(1000)]
    assert len({identify(environ).rendezvous for environ in environs}) == 1000


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a", ["a"]),
        ("a,b-1.c", ["a", "b-1.c"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[08-10,2],m", ["n08", "n09", "n10", "n2", "m"]),
        ("r[1-2]n[3-4]-ib", ["r1n3-ib", "r1n4-ib", "r2n3-ib", "r2n4-ib"]),
    ],
)
def test_host_lists(text: str, hosts: list[str]) -> None:
    assert expand("list", text) == tuple(hosts)


@pytest.mark.parametrize("text", ["", "a,,b", "n[1", "n]1[", "n[[1]]", "n[]", "n[a-b]", "n[3-1]", "n[1-99999999]"])
def test_what_is_no_host_list(text: str) -> None:
    with pytest.raises(InvalidInput, match="Slurm's notation"):
        expand("list", text)


@pytest.mark.parametrize(("text", "numbers"), [("2", [2]), ("2(x3),1", [2, 2, 2, 1]), ("1,3(x2)", [1, 3, 3])])
def test_counts(text: str, numbers: list[int]) -> None:
    assert counts("list", text) == tuple(numbers)
