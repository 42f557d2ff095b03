"""Faults that stall a step: every log and the launcher name the worker, its activity and the line."""

from __future__ import annotations

import os
import signal

import pytest
from benchmarks.netlab import Unavailable, netlab

from tests.end_to_end.faults.coordinated_runs import under_way
from tests.end_to_end.faults.planted import line_of
from tests.end_to_end.faults.runs import PLANTED


@pytest.mark.short(1)
@pytest.mark.parametrize(("fault", "load", "does", "function"), [
    ("sleep", "Threads()", "waiting for data", "__getitem__"),
    ("sleep", "Processes(2)", "waiting for data", "__getitem__"),
    ("lock", "Inline()", "computing", "go_wrong"),
])  # fmt: skip
def test_who_is_stuck_in_code_of_the_users_is_named_with_what_it_does_and_the_line(
    fault, load, does, function, tmp_path
) -> None:
    with under_way(fault, tmp_path, load=load) as run:
        _, message = run.wait("finding")
        words = message["text"]
        assert f"worker 1 has not arrived, {does} for" in words
        assert f"{PLANTED}:{line_of(fault)} {function}" in words
        assert "worker 0 waits for it in sum (gradients, message" in words
        for rank in range(2):
            run.log(rank, words)


def test_who_leaves_out_a_collective_is_named_beside_the_line_where_the_other_waits_for_it(tmp_path) -> None:
    with under_way("branch", tmp_path, sync_batchnorm=True, compress="Cast()") as run:
        _, message = run.wait("finding")
        words = message["text"]
        assert "workers wait for different operations" in words
        assert "worker 0 is waiting for gather (batchnorm, message" in words
        assert f"{PLANTED}:{line_of('branch')} forward" in words
        assert "worker 1 is waiting for sum (gradients, message" in words


@pytest.mark.short(1)
@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_who_is_frozen_or_killed_is_named_with_what_it_did_last_and_the_other_goes_on(how, tmp_path) -> None:
    with under_way("", tmp_path, steps=1_000_000) as run:
        while run.wait("progress")[1]["step"] < 50:
            pass
        os.kill(run.workers.processes[1].pid, how)
        if how is signal.SIGKILL:
            run.workers.processes[1].join()
            run.gone(1)
        rank, message = run.wait("finding")
        assert rank == 0
        said = {signal.SIGSTOP: "worker 1 is frozen or cut off, without a report for",
                signal.SIGKILL: "the process of worker 1 has exited"}[how]  # fmt: skip
        assert said in message["text"]
        assert "last reported: " in message["text"]
        run.log(0, message["text"])
        step = run.wait("progress")[1]["step"]
        while run.wait("progress")[1]["step"] < step + 50:
            pass
        spent = run.spent(0)
        assert spent["recovery"] > 0
        assert how is signal.SIGKILL or spent["lost work"] > 0.1  # it waited for it in the middle of a step


@pytest.mark.long
def test_a_worker_that_freezes_again_and_again_is_noticed_each_time_and_pauses_longer_and_longer(tmp_path) -> None:
    with under_way("", tmp_path, steps=1_000_000) as run:
        while run.wait("progress")[1]["step"] < 50:
            pass
        for _ in range(3):
            run.until("0", "1")
            os.kill(run.workers.processes[1].pid, signal.SIGSTOP)
            run.until("0")
            os.kill(run.workers.processes[1].pid, signal.SIGCONT)
        run.until("0", "1")
        ends = [each.text for each in run.status().decisions if "no heartbeat of 1 arrives" in each.text]
    said = [words.partition("; once it is back, it is quarantined for ")[2] for words in ends]
    assert said[:3] == ["", "1 s", "2 s"]  # on a busy machine more may follow


@pytest.mark.root
def test_who_is_cut_off_is_named_and_the_other_goes_on(tmp_path) -> None:
    """Two hosts, and a cable that is pulled out."""
    try:
        with netlab(2) as lab, under_way("", tmp_path, hosts=lab.hosts, steps=1_000_000) as run:
            while run.wait("progress")[1]["step"] < 50:
                pass
            lab.hosts[1].cut()
            rank, message = run.wait("finding")
            assert rank == 0
            assert "worker 1 is frozen or cut off, without a report for" in message["text"]
            assert "or its host or link is down" in message["text"]
            step = run.wait("progress")[1]["step"]
            while run.wait("progress")[1]["step"] < step + 50:
                pass
    except Unavailable as refused:
        pytest.skip(str(refused))
