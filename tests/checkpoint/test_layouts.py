"""A checkpoint written under one layout is read under another, bit for bit, each element stored once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.checkpoint.sharded_states import LAYOUTS, Holdings, holders, locals_of, save_parts, tensors, wrong
from tests.checkpoint.states import every_kind, numbered, save, unexpected
from tests.support.checkpoints import load
from unisono.checkpoint import (
    Box,
    Writer,
    decode_shards,
    encode_shards,
    fingerprint,
    fingerprint_of,
    open_checkpoint,
    open_newest,
    shards_of,
)
from unisono.checkpoint.manifest import seal, unseal
from unisono.checkpoint.ownership import write_plan
from unisono.errors import CheckpointDamaged, CheckpointError

STEP = "step-00000003"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for name, lie in LAYOUTS.items():
        found[name] = tmp_path_factory.mktemp("written")
        events = save_parts(found[name], 3, tensors(), lie(tensors()), meta={"layout": name})
        assert [event.kind for event in events] == ["committed"], events
    return found


@pytest.mark.parametrize("read", LAYOUTS)
@pytest.mark.parametrize("wrote", LAYOUTS)
def test_written_by_any_read_by_any(written: dict[str, Path], wrote: str, read: str) -> None:
    opened = open_newest(written[wrote], unexpected)
    assert opened is not None
    assert (opened.step, opened.meta) == (3, {"layout": wrote})
    assert wrong(opened, tensors(), LAYOUTS[read](tensors())) == []


@pytest.mark.parametrize("wrote", LAYOUTS)
def test_the_whole_and_its_fingerprint_do_not_depend_on_the_layout(written: dict[str, Path], wrote: str) -> None:
    opened = open_checkpoint(written[wrote] / STEP)
    assert fingerprint(load(written[wrote] / STEP).tensors) == fingerprint(tensors())
    assert fingerprint_of(opened, "") == fingerprint(tensors())
    weights = {name.removeprefix("model/"): x for name, x in tensors().items() if name.startswith("model/")}
    assert fingerprint_of(opened) == fingerprint(weights)
    assert {name: (s.dtype, s.shape) for name, s in opened.specs.items()} == {
        name: (x.dtype, tuple(x.shape)) for name, x in tensors().items()
    }


@pytest.mark.parametrize("wrote", LAYOUTS)
def test_every_number_is_stored_once(written: dict[str, Path], wrote: str) -> None:
    headers = [path.read_bytes()[8:4096] for path in sorted((written[wrote] / STEP).glob("part-*"))]
    ends = [max((e["data_offsets"][1] for e in json.loads(h).values() if "dtype" in e), default=0) for h in headers]
    assert len(headers) == len(LAYOUTS[wrote](tensors()))
    assert sum(ends) == sum(x.nbytes for x in tensors().values())


def test_a_tensor_larger_than_what_is_read_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unisono.checkpoint.opened_checkpoint.CHUNK", 24)  # bytes: less than a row
    for i, (name, lie) in enumerate(LAYOUTS.items()):
        save_parts(tmp_path / name, 3, tensors(), lie(tensors()))
        for read in list(LAYOUTS)[i % 3 :: 3]:
            opened = open_checkpoint(tmp_path / name / STEP)
            assert wrong(opened, tensors(), LAYOUTS[read](tensors())) == []
            assert wrong(opened, tensors(), LAYOUTS[read](tensors())) == []  # now all is verified, and read in part
        assert fingerprint_of(opened, "") == fingerprint(tensors())


def test_every_dtype_is_cut_and_joined_bit_by_bit(tmp_path: Path) -> None:
    found = {name: x for name, x in every_kind().items() if name != "parameter"}
    save_parts(tmp_path, 3, found, LAYOUTS["columns over 2"](found))
    opened = open_checkpoint(tmp_path / STEP)
    assert wrong(opened, found, LAYOUTS["grid of 3 x 2"](found)) == []


@st.composite
def tilings(draw: st.DrawFn, shape: tuple[int, ...], workers: int) -> list[Box]:
    """A box for each worker by cutting the largest again and again, at random."""
    found = [Box.whole(shape)]
    while len(found) < workers:
        box = found.pop(max(range(len(found)), key=lambda i: found[i].numel))
        axis = draw(st.integers(0, len(shape) - 1))
        begin, end = box.offset[axis], box.offset[axis] + box.size[axis]
        at = draw(st.integers(begin, end))
        found += [box.cut(axis, begin, at), box.cut(axis, at, end)]
    return draw(st.permutations(found))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[torch.Tensor, Holdings, list[Box]]:
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=4)))
    tensor = torch.arange(torch.Size(shape).numel()).view(shape)
    twice = draw(st.integers(1, 2))
    lie = [{"x": box} for box in draw(tilings(shape, draw(st.integers(1, 5))))] * twice
    return tensor, lie, draw(tilings(shape, draw(st.integers(1, 5))))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pairs(), st.sampled_from([8, 56, 1 << 20]))
def test_random_boxes(
    tmp_path_factory: pytest.TempPathFactory, pair: tuple[torch.Tensor, Holdings, list[Box]], most: int
) -> None:
    tensor, lie, boxes = pair
    path = tmp_path_factory.mktemp("random")
    save_parts(path, 3, {"x": tensor}, lie)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("unisono.checkpoint.opened_checkpoint.CHUNK", most)
        opened = open_checkpoint(path / STEP)
        assert wrong(opened, {"x": tensor}, [{"x": box} for box in boxes] * 2) == []


# --- who writes what


def test_replicas_share_what_they_hold_alike_by_bytes() -> None:
    found = {f"model/{i}": torch.zeros(40, 10) for i in range(8)}
    lie = [dict.fromkeys(found, box) for box in [Box((40, 10), (20 * (i % 2), 0), (20, 10)) for i in range(4)]]
    dealt = write_plan(holders(found, lie))
    assert [len(share) for share in dealt] == [4, 4, 4, 4]
    for rank, share in enumerate(dealt):
        assert {piece.box for piece in share.values()} == {lie[rank]["model/0"]}
    assert sorted([*dealt[0], *dealt[2]]) == sorted(found) == sorted([*dealt[1], *dealt[3]])


def test_what_is_whole_everywhere_goes_to_those_who_write_least() -> None:
    found = {"cut": torch.zeros(100), "a": torch.zeros(30), "b": torch.zeros(30)}
    whole = {name: Box.whole((30,)) for name in "ab"}
    lie = [whole | {"cut": Box((100,), (0,), (100,))}, dict(whole), dict(whole)]
    assert [sorted(share) for share in write_plan(holders(found, lie))] == [["cut"], ["a"], ["b"]]


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_a_worker_holds_can_be_told(name: str) -> None:
    for held in holders(tensors(), LAYOUTS[name](tensors())):
        assert decode_shards(encode_shards(held)) == held


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"x": 1}', '{"x": ["float32", [1], [0]]}', '{"x": ["object", [1], [0], [1]]}',
     '{"x": ["float32", [1], [1], [1]]}', '{"x": ["float32", [1.0], [0], [1]]}', '{"x": ["float32", 1, 0, 1]}'],
)  # fmt: skip
def test_what_was_told_wrongly_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        decode_shards(text)


def _cut(*rows: tuple[int, int]) -> Holdings:
    return [{"w": Box.whole((4, 2)).cut(0, *at)} for at in rows]


@pytest.mark.parametrize(
    ("lie", "words"),
    [
        (_cut((0, 1), (2, 4)), r"'w' cannot be written: \[1:2, 0:2\] of \[4, 2\] is missing"),
        (_cut((0, 3), (2, 4)), r"'w' cannot be written: \[2:3, 0:2\] of \[4, 2\] is covered twice"),
        (_cut((0, 4), (2, 4)), r"'w' cannot be written: \[2:4, 0:2\] of \[4, 2\] is covered twice"),
        (_cut((0, 0), (4, 4)), r"'w' cannot be written: \[0:4, 0:2\] of \[4, 2\] is missing"),
    ],
)
def test_workers_that_do_not_make_up_a_whole_write_nothing(tmp_path: Path, lie: Holdings, words: str) -> None:
    found = {"w": torch.zeros(4, 2)}
    with pytest.raises(CheckpointError, match=words):
        write_plan(holders(found, lie))
    events = save_parts(tmp_path, 3, found, lie)
    assert {event.kind for event in events} == {"failed"}
    assert "'w' cannot be written" in events[0].words
    assert open_newest(tmp_path, unexpected) is None


def test_workers_that_disagree_on_a_tensor_are_told() -> None:
    one, other = shards_of({"w": torch.zeros(2)}), shards_of({"w": torch.zeros(2).half()})
    with pytest.raises(CheckpointError, match=r"'w' is float32 \[2\] on one worker and float16 \[2\]"):
        write_plan([one, other])


def test_a_worker_that_holds_something_else_than_it_told_is_stopped_at_once(tmp_path: Path) -> None:
    found = tensors()
    lie = LAYOUTS["rows over 2"](found)
    writer = Writer(tmp_path, 0, 2, 2, unexpected)  # type: ignore[arg-type]
    for mine, words in [
        (locals_of(found, lie[0]) | {"model/matrix": torch.zeros(1, 6)}, r"'model/matrix' is float32 \[1, 6\] here"),
        ({}, "'model/bias' is missing here"),
        (locals_of(found, lie[0]) | {"new": torch.zeros(1)}, r"'new' is float32 \[1\] here and missing in holders"),
    ]:
        with pytest.raises(ValueError, match=words):
            writer.stage(3, mine, None, holders(found, lie))
    with pytest.raises(ValueError, match="holders are given for 2 ranks"):
        Writer(tmp_path, 0, 3, 2, unexpected).stage(3, {}, None, holders(found, lie))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'x' is missing"):
        shards_of({}, {"x": Box.whole(())})
    writer.close()


def test_memory_is_taken_anew_when_the_layout_changes(tmp_path: Path) -> None:
    found = tensors()
    writer = Writer(tmp_path, 0, 1, 9, lambda event: None)
    for step, told in enumerate([None, [shards_of(found)], None, [shards_of({"model/bias": found["model/bias"]})]]):
        mine = found if step < 3 else {"model/bias": found["model/bias"]}
        writer.stage(step, mine, None, told)
        writer.finish()
        writer.commit(step)
        writer.finish()
        assert fingerprint(load(tmp_path / f"step-{step:08d}").tensors) == fingerprint(mine)
    writer.close()


# --- the manifest


def test_a_checkpoint_of_the_first_format_still_opens(tmp_path: Path) -> None:
    save(tmp_path, 3, numbered(3), size=2)
    path = tmp_path / STEP / "manifest.json"
    fields = unseal(path.read_bytes())
    assert fields["format"] == 2
    assert fields["tensors"]["model/0"].keys() == {"dtype", "shape", "xxh3", "part"}  # as the first format has it
    path.write_bytes(seal(fields | {"format": 1}))
    assert fingerprint(load(tmp_path / STEP).tensors) == fingerprint(numbered(3))


def _boxes(fields: dict) -> list:  # type: ignore[type-arg]
    boxes: list = fields["tensors"]["model/matrix"]["boxes"]  # type: ignore[type-arg]
    return boxes


HOSTILE = {
    "a box missing": (lambda f: _boxes(f).pop(1), r"'model/matrix': \[2:4, 0:6\] of \[8, 6\] is missing"),
    "a box twice": (lambda f: _boxes(f)[1].update(offset=[0, 0]), r"'model/matrix': \[0:2, 0:6\] .* is covered twice"),
    "a box outside": (lambda f: _boxes(f)[3].update(offset=[7, 0]), "'model/matrix': .* is not inside a tensor of"),
    "two in a part": (
        lambda f: _boxes(f)[3].update(part=0),
        "'model/matrix' is in a part file that does not exist, or twice",
    ),
    "no boxes": (lambda f: _boxes(f).clear(), "'model/matrix' has both boxes and a part file"),
    "a box as text": (lambda f: _boxes(f).append("x"), "'model/matrix' is in a part file that does not exist"),
    "half a box": (lambda f: _boxes(f)[0].pop("size"), "size is missing"),
    "fractions": (lambda f: _boxes(f)[0].update(offset=[0.0, 0]), "'model/matrix' has no possible box"),
    "fewer dimensions": (
        lambda f: _boxes(f)[0].update(offset=[0], size=[2]),
        "'model/matrix': .* is not inside a tensor of",
    ),
    "whole and cut": (lambda f: f["tensors"]["model/matrix"].update(part=1), "both boxes and a part file"),
    "boxes as an object": (lambda f: f["tensors"]["model/matrix"].update(boxes={"a": 1}), "boxes is missing or not"),
}


@pytest.mark.parametrize(("change", "words"), HOSTILE.values(), ids=HOSTILE.keys())
def test_boxes_that_cannot_be_are_damage_that_is_named(tmp_path: Path, change: object, words: str) -> None:
    save_parts(tmp_path, 3, tensors(), LAYOUTS["rows over 4"](tensors()))
    path = tmp_path / STEP / "manifest.json"
    fields = unseal(path.read_bytes())
    change(fields)  # type: ignore[operator]
    path.write_bytes(seal(fields))
    with pytest.raises(CheckpointDamaged, match=f"manifest.json: .*{words}"):
        open_checkpoint(tmp_path / STEP)


def test_parts_that_do_not_fit_each_other_are_not_committed(tmp_path: Path) -> None:
    """Worker 1 has other holders than worker 0: nothing becomes a checkpoint."""
    found = {"w": torch.zeros(4, 2)}
    events: list[object] = []
    writers = [Writer(tmp_path, rank, 2, 2, events.append) for rank in range(2)]
    sound = _cut((0, 2), (2, 4))
    other = [{"w": Box((4, 2), (0, 0), (1, 2))}, {"w": Box((4, 2), (1, 0), (3, 2))}]
    for writer, lie in zip(writers, [sound, other]):
        rank = writers.index(writer)
        writer.stage(3, locals_of(found, lie[rank]), None, holders(found, lie))
    for writer in writers:
        writer.finish()
    writers[0].commit(3)
    for writer in writers:
        writer.finish()
        writer.close()
    assert "tensor 'w': [1:2, 0:2] of [4, 2] is covered twice: the workers do not agree" in str(events[0])
    assert list(tmp_path.iterdir()) == []
