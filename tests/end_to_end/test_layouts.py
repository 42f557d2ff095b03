"""Runs under layouts on real processes compute what one worker computes on the same micro-batches."""

from __future__ import annotations

import pytest
import safetensors.torch

from tests.support.processes import ChildFailed
from tests.support.training_runs import differ, losses, source, train
from unisono import notation
from unisono.checkpoint import fingerprint_of, open_newest
from unisono.cli import main
from unisono.layout import LAYOUTS as LAYOUTS_BY_NAME
from unisono.layout import RankMesh

TEXT = source("text", text=(__file__,), model={"layers": 2, "width": 32, "heads": 2, "context": 16, "dropout": 0.0})
EVEN = {"global_batch": 48, "micro_batch": 4}
TASKS = {
    "digits": (source("digits"), {}),
    "text": (TEXT, {}),
    "sgd": (source("regression", optimizer="sgd", dropout=0.1), EVEN),
    "adamw": (source("regression", optimizer="adamw", dropout=0.1, noise=0.1), EVEN),
    "clip": (source("regression", optimizer="sgd"), {"clip": 0.05, **EVEN}),
}
SAME = 2e-6


LAYOUTS = [
    ("Layout(shard=2)", 2),
    ("Layout(shard=4)", 4),
    ("Layout(tensor=2)", 2),
    ("Layout(shard=2, tensor=2)", 4),
]


@pytest.mark.short(3)
@pytest.mark.parametrize(("layout", "workers"), LAYOUTS)
@pytest.mark.parametrize("name", TASKS)
def test_a_layout_computes_what_one_worker_does(name, layout, workers, tmp_path) -> None:
    task, settings = TASKS[name]
    alone = losses(tmp_path / "alone", 1, task, **settings)
    assert differ(losses(tmp_path / "laid", workers, task, layout=layout, **settings), alone) <= SAME


@pytest.mark.long
def test_the_users_own_plan_computes_what_one_worker_does(tmp_path) -> None:
    plan = "{'blocks.*.query_key_value': 'column of thirds', 'blocks.*.attention.output': 'row'}"
    laid = losses(tmp_path / "laid", 2, TEXT, layout=f"Layout(tensor=2, plan={plan})")
    assert differ(laid, losses(tmp_path / "alone", 1, TEXT)) <= SAME


@pytest.mark.short(1)
@pytest.mark.parametrize(
    ("layout", "workers", "name"),
    [
        ("Layout(shard=2)", 2, "digits"),
        ("Layout(tensor=2)", 4, "sgd"),
        ("Layout(shard=2, pipeline=2, schedule='ZBVZeroBubble')", 4, "digits"),
    ],
)
def test_batchnorm_is_synchronized_over_all_who_compute_side_by_side(layout, workers, name, tmp_path) -> None:
    task, settings = TASKS[name] if name != "sgd" else (source("regression", optimizer="sgd"), EVEN)
    side_by_side = RankMesh(notation.parse("layout", layout, LAYOUTS_BY_NAME), workers).data_parallel_size
    whole = losses(tmp_path / "whole", side_by_side, task, sync_batchnorm=True, **settings)
    laid = losses(tmp_path / "laid", workers, task, layout=layout, sync_batchnorm=True, **settings)
    assert differ(laid, whole) <= SAME


DROPPING = source("text", text=(__file__,), model={"layers": 2, "width": 32, "heads": 2, "context": 16, "dropout": 0.1})
NORMED = source("regression", optimizer="sgd", dropout=0.1)  # running statistics, and masks
PIPELINES = [
    ("Layout(pipeline=2)", 2, DROPPING),
    ("Layout(pipeline=2, schedule='Interleaved1F1B')", 2, DROPPING),
    ("Layout(pipeline=2, schedule='ZBVZeroBubble')", 2, DROPPING),
    ("Layout(pipeline=2, cuts=('blocks.1',))", 2, TEXT),
    ("Layout(pipeline=4, schedule='GPipe')", 4, DROPPING),
    ("Layout(shard=2, pipeline=2)", 4, DROPPING),
    ("Layout(tensor=2, pipeline=2)", 4, TEXT),
    ("Layout(pipeline=3)", 3, NORMED),
    ("Layout(pipeline=2)", 4, NORMED),
    ("Layout(shard=2, pipeline=2)", 4, NORMED),
]


@pytest.mark.short(2)
@pytest.mark.parametrize(("layout", "workers", "task"), PIPELINES)
def test_a_pipeline_computes_what_one_worker_does(layout, workers, task, tmp_path) -> None:
    settings = {"global_batch": 48, "micro_batch": 4, "clip": 0.5} if task.name != "text" else {"micro_batch": 8}
    alone = losses(tmp_path / "alone", 1, task, **settings)
    assert differ(losses(tmp_path / "laid", workers, task, layout=layout, **settings), alone) <= SAME


WHOLES = [
    ("Layout(shard=2)", 2, {}),
    ("Layout(tensor=2)", 2, {"clip": 0.05}),
    ("Layout(replicate=2, shard=2)", 4, {"clip": 0.05}),
    ("Layout(shard=2, pipeline=2)", 4, {}),
    ("Layout(shard=2, zero=1)", 4, {"sync": "LocalSGD(every=4)"}),
]


@pytest.mark.short(1)
@pytest.mark.parametrize(("layout", "workers", "options"), WHOLES)
def test_an_optimizer_that_looks_at_whole_tensors_sees_them(layout, workers, options, tmp_path) -> None:
    task, settings = source("regression", optimizer="adafactor"), {**EVEN, **options}
    alone = losses(tmp_path / "alone", 2 if "sync" in options else 1, task, **settings)
    assert differ(losses(tmp_path / "laid", workers, task, layout=layout, **settings), alone) <= SAME


@pytest.mark.short(1)
@pytest.mark.parametrize(
    ("layout", "workers"), [("Layout(tensor=2)", 2), ("Layout(pipeline=2)", 2), ("Layout(tensor=2, pipeline=2)", 4)]
)
def test_blocks_that_share_weights_learn_what_they_do_on_one_worker(layout, workers, tmp_path) -> None:
    alone = losses(tmp_path / "alone", 1, source("tied"), **EVEN)
    assert differ(losses(tmp_path / "laid", workers, source("tied"), layout=layout, **EVEN), alone) <= SAME


@pytest.mark.short(1)
@pytest.mark.parametrize(
    ("layout", "workers", "dtype", "near"),
    [
        ("Layout(shard=2)", 2, "float64", SAME),
        ("Layout(shard=2)", 2, "bfloat16", 1e-2),  # gradients are added in another order
        ("Layout(replicate=2, shard=2, zero=1)", 4, "float64", SAME),
        ("Layout(shard=2, pipeline=2)", 4, "float64", SAME),
    ],
)
def test_layers_of_another_dtype_are_gathered_by_themselves(layout, workers, dtype, near, tmp_path) -> None:
    task = source("dtypes", dtype=dtype)
    alone = losses(tmp_path / "alone", 1, task, **EVEN)
    assert differ(losses(tmp_path / "laid", workers, task, layout=layout, **EVEN), alone) <= near


OPTIONS = [
    ("Layout(replicate=2)", 2, "clip", {}),
    ("Layout(replicate=2, shard=2)", 4, "adamw", {}),
    ("Layout(replicate=2, tensor=2)", 4, "text", {}),
    ("Layout(replicate=2, pipeline=2)", 4, "text", {"micro_batch": 8}),
    ("Layout(replicate=2, zero=1)", 2, "text", {}),
    ("Layout(shard=2, zero=1)", 2, "clip", {}),
    ("Layout(shard=2, zero=2)", 2, "text", {}),
    ("Layout(shard=2, pipeline=2, zero=1)", 4, "text", {"micro_batch": 8}),
    ("Layout(shard=2, offload=True)", 2, "text", {}),
    ("Layout(shard=2)", 2, "sgd", {"activation_checkpointing": "blocks"}),
    ("Layout(tensor=2)", 2, "text", {"activation_checkpointing": "selective"}),
    ("Layout(context=2)", 2, "text", {"activation_checkpointing": "selective"}),
    ("Layout(pipeline=2)", 2, "norm", {"activation_checkpointing": "blocks"}),
    (
        "Layout(pipeline=2, schedule='ZBVZeroBubble')",
        2,
        "text",
        {"activation_checkpointing": "selective", "micro_batch": 8},
    ),
    ("Layout(shard=2)", 2, "still", {"compile": True}),
    ("Layout(pipeline=2)", 2, "still", {"compile": True, "activation_checkpointing": "blocks"}),
]
MORE = {
    "norm": (source("regression", optimizer="sgd"), EVEN),
    "still": (source("regression", optimizer="sgd", norm=False), EVEN),
}


@pytest.mark.short(3)
@pytest.mark.parametrize(("layout", "workers", "name", "options"), OPTIONS)
def test_an_option_changes_what_is_kept_and_sent_but_not_what_is_computed(
    layout, workers, name, options, tmp_path
) -> None:
    task, settings = (TASKS | MORE)[name]
    settings = settings | {key: value for key, value in options.items() if key == "micro_batch"}
    alone = losses(tmp_path / "alone", 1, task, **settings)
    assert differ(losses(tmp_path / "laid", workers, task, layout=layout, **{**settings, **options}), alone) <= SAME


def test_parameters_in_bf16_learn_what_those_in_fp32_do(tmp_path) -> None:
    alone = losses(tmp_path / "alone", 1, TEXT)
    half = losses(tmp_path / "half", 2, TEXT, layout="Layout(shard=2)", precision="bf16_parameters")
    assert SAME < differ(half, alone) < 2e-2


@pytest.mark.short(1)
@pytest.mark.parametrize("kind", ["blocks", "selective"])
@pytest.mark.parametrize(("workers", "options"), [(1, {}), (2, {"sync": "ParameterServer(servers=1)"})])
def test_what_is_computed_again_without_a_layout_has_the_same_bits(workers, options, kind, tmp_path) -> None:
    plain = losses(tmp_path / "plain", workers, TASKS["sgd"][0], **EVEN, **options)
    again = losses(tmp_path / "again", workers, TASKS["sgd"][0], activation_checkpointing=kind, **EVEN, **options)
    assert differ(again, plain) == 0.0


CONTEXTS = [
    ("Layout(context=2)", 2),
    ("Layout(context=4)", 4),
    ("Layout(shard=2, context=2)", 4),
    ("Layout(context=2, tensor=2)", 4),
    ("Layout(context=2, pipeline=2)", 4),
]


@pytest.mark.short(1)
@pytest.mark.parametrize(("layout", "workers"), CONTEXTS)
def test_a_sequence_on_several_workers_teaches_what_it_does_on_one(layout, workers, tmp_path) -> None:
    alone = losses(tmp_path / "alone", 1, TEXT)
    assert differ(losses(tmp_path / "laid", workers, TEXT, layout=layout), alone) <= SAME


@pytest.mark.short(1)
@pytest.mark.parametrize(
    ("sync", "compress"),
    [
        ("AllReduce()", "Cast()"),
        ("AllReduce()", "Quantize(8)"),
        ("LocalSGD(every=3)", "Cast()"),
        ("ParameterServer(servers=1)", "Cast()"),
    ],
)
def test_two_replicas_agree_as_two_whole_ones_do(sync, compress, tmp_path) -> None:
    options = {"sync": sync, "compress": compress}
    whole = losses(tmp_path / "whole", 2, TEXT, **options)
    laid = losses(tmp_path / "laid", 4, TEXT, layout="Layout(shard=2)", **options)
    rounded = 3e-3 if "Quantize" in compress else SAME  # blocks of numbers lie elsewhere
    assert differ(laid, whole) <= rounded


@pytest.mark.long
def test_servers_clip_by_the_norm_of_the_whole_replica(tmp_path) -> None:
    """What several workers of a replica hold counts once; without clipping the losses are others."""
    options = {"sync": "ParameterServer(servers=1)", "clip": 0.5, "micro_batch": 8}
    whole = losses(tmp_path / "whole", 2, TEXT, **options)
    for layout in ("Layout(tensor=2)", "Layout(pipeline=2)", "Layout(replicate=2)"):
        assert differ(losses(tmp_path / layout, 4, TEXT, layout=layout, **options), whole) <= SAME
    assert differ(losses(tmp_path / "free", 2, TEXT, **{**options, "clip": None}), whole) > 100 * SAME


@pytest.mark.short(1)
@pytest.mark.parametrize("layout", ["Layout(replicate=2)", "Layout(shard=2, zero=1)"])
def test_an_evaluation_between_steps_leaves_no_weights_behind(layout, tmp_path) -> None:
    """Between two agreements it is of what the replicas would agree on, and each goes on from its own."""
    task = source("regression", optimizer="sgd", norm=False)
    settings = {"sync": "LocalSGD(every=4)", "evaluate_every": 3, **EVEN}
    whole = losses(tmp_path / "whole", 2, task, **settings)
    assert differ(losses(tmp_path / "laid", 4, task, layout=layout, **settings), whole) <= SAME


@pytest.mark.parametrize(
    ("workers", "settings", "words"),
    [
        (3, {}, "write --workers 2 or 4"),
        (2, {"global_batch": 30, "micro_batch": 10}, "there are 2 or 4"),
        (2, {"compress": "Exact()"}, "gradients are summed as floats within a replica"),
        (2, {"sync": "ParameterServer(staleness=2)"}, "assigns micro-batches to single workers"),
        (2, {"sync": "Gossip(asynchronous=True)"}, "assigns micro-batches to single workers"),
        (
            4,
            {"sync_batchnorm": True, "micro_batch": 6, "sync": "LocalSGD(2)"},
            "do not compute micro-batches in parallel",
        ),
        (2, {"layout": "Layout(pipeline=2)", "micro_batch": 24}, "use 2 micro-batches per step"),
        (2, {"layout": "Layout(pipeline=2, cuts=('layers.9',))"}, "has no module of that name"),
        (2, {"layout": "Layout(context=2)"}, "on parts of a sequence"),
        (2, {"layout": "Layout(tensor=2, zero=1)"}, "no gradients are summed over workers; write shard=2"),
        (2, {"layout": "Layout(offload=True)"}, "this layout has one worker; write shard=2"),
        (2, {"layout": "Layout()", "precision": "bf16_parameters"}, "write bf16, or a layout"),
    ],
)
def test_what_cannot_be_is_refused_with_the_cure(workers, settings, words, tmp_path) -> None:
    with pytest.raises(ChildFailed, match=words):
        train(workers, source("regression"), tmp_path, workers=workers, **{"layout": "Layout(shard=2)", **settings})


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ("Layout(tensor=4)", "write tensor=2"),  # two heads
        ("Layout(tensor=2, plan={'head': 'row'})", "plan = 'head': 'row': head: a row without an earlier column layer"),
        ("Layout(context=3)", "the nearest length that works is 18"),
        ("Layout(pipeline=4, schedule='LoopedBFS')", "stages = 8: the model has 5 units, so 1 to 5 stages; cut into 5"),
    ],
)
def test_what_the_model_does_not_allow_is_refused_with_the_cure(layout, words, tmp_path) -> None:
    workers = int(layout.partition("=")[2][0])
    with pytest.raises(ChildFailed, match=words):
        train(workers, TEXT, tmp_path, workers=workers, layout=layout, micro_batch=8)


WAYS = [
    (1, "Layout()"),
    (3, "Layout()"),
    (2, "Layout(shard=2)"),
    (4, "Layout(shard=4)"),
    (4, "Layout(shard=2)"),
    (2, "Layout(tensor=2)"),
    (4, "Layout(tensor=2)"),
    (4, "Layout(shard=2, tensor=2)"),
    (2, "Layout(pipeline=2)"),
    (4, "Layout(shard=2, pipeline=2)"),
    (2, "Layout(replicate=2)"),
    (4, "Layout(replicate=2, shard=2)"),
]


@pytest.mark.short(2)
@pytest.mark.parametrize(("saved", "loaded"), [*zip(WAYS, [*WAYS[3:], *WAYS[:3]])], ids=str)
def test_a_checkpoint_opens_under_any_other_layout(saved, loaded, tmp_path) -> None:
    """Weights, AdamW's state, random streams and the position in the data; each is written once and read once here,
    and that any boxes fill any others is shown for all pairs in `tests.checkpoint.test_layouts`."""
    task = source("regression", optimizer="adamw", noise=0.1, norm=False)
    settings = {"global_batch": 48, "micro_batch": 4, "schedule": "Constant()"}
    whole = train(1, task, tmp_path / "whole", steps=12, workers=1, **settings)
    run = tmp_path / "parts"
    for (workers, layout), steps in ((saved, 5), (loaded, 12)):
        last = train(workers, task, run, steps=steps, workers=workers, layout=layout, run_dir=str(run),
                     resume=steps == 12, **settings)  # fmt: skip
    assert last["steps"] == 12
    assert last["loss"] == pytest.approx(whole["loss"], abs=SAME)
    assert last["metrics"] == pytest.approx(whole["metrics"], abs=SAME)


@pytest.mark.short(1)
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ((4, "Layout(shard=2, tensor=2)"), (2, "Layout(shard=2)")),
        ((2, "Layout(tensor=2)"), (1, "Layout()")),
        ((2, "Layout(pipeline=2)"), (2, "Layout(tensor=2)")),
    ],
    ids=str,
)
def test_what_is_remembered_of_whole_tensors_opens_under_any_other_layout(saved, loaded, tmp_path) -> None:
    task, settings = source("regression", optimizer="adafactor", norm=False), {**EVEN, "schedule": "Constant()"}
    whole = train(1, task, tmp_path / "whole", steps=12, workers=1, **settings)
    run = tmp_path / "parts"
    for (workers, layout), steps in ((saved, 5), (loaded, 12)):
        last = train(workers, task, run, steps=steps, workers=workers, layout=layout, run_dir=str(run),
                     resume=steps == 12, **settings)  # fmt: skip
    assert last["loss"] == pytest.approx(whole["loss"], abs=SAME)


def test_plain_numbers_of_every_stages_optimizer_are_saved(tmp_path) -> None:
    task = source("regression", optimizer="slowing", norm=False)
    settings = {"schedule": "Constant()", **EVEN}
    whole = train(1, task, tmp_path / "whole", steps=12, workers=1, **settings)
    run = tmp_path / "parts"
    for steps in (5, 12):
        last = train(2, task, run, steps=steps, workers=2, layout="Layout(pipeline=2)", run_dir=str(run),
                     resume=steps == 12, **settings)  # fmt: skip
    assert last["loss"] == pytest.approx(whole["loss"], abs=SAME)
    assert last["metrics"] == pytest.approx(whole["metrics"], abs=SAME)


@pytest.mark.long
def test_a_run_goes_on_wherever_its_stages_are_cut(tmp_path) -> None:
    whole = train(1, DROPPING, tmp_path / "whole", steps=8, workers=1, micro_batch=8, schedule="Constant()")
    run = tmp_path / "cut"
    for cut, steps in (("blocks.0", 3), ("blocks.1", 5), ("head", 8)):
        layout = f"Layout(pipeline=2, cuts=('{cut}',))"
        last = train(2, DROPPING, run, steps=steps, workers=2, layout=layout, micro_batch=8, schedule="Constant()",
                     run_dir=str(run), resume=steps > 3)  # fmt: skip
    assert last["loss"] == pytest.approx(whole["loss"], abs=SAME)
    assert last["metrics"] == pytest.approx(whole["metrics"], abs=SAME)


@pytest.mark.parametrize(("workers", "layout"), [(1, "Layout()"), (2, "Layout(pipeline=2)")])
def test_a_run_may_start_from_weights_in_a_file(workers, layout, tmp_path) -> None:
    """Nothing is learned in the second run, so that its weights are those of the file."""
    task, file = source("regression", optimizer="adamw", norm=False), tmp_path / "model.safetensors"
    first = train(1, task, tmp_path / "first", steps=12, workers=1, **EVEN)
    assert main(["checkpoint", "convert", str(tmp_path / "first"), "--to", str(file)]) == 0
    run = tmp_path / "second"
    assert main(["checkpoint", "convert", str(run / "checkpoints"), "--from", str(file)]) == 0
    told = train(workers, task, run, steps=1, lr=1e-30, workers=workers, layout=layout, run_dir=str(run), resume=True,
                 seed=3, **EVEN)  # fmt: skip
    assert told["weights_sha256"] == first["weights_sha256"]
    again = train(workers, task, run, steps=3, workers=workers, run_dir=str(run), resume=True, seed=3, **EVEN)
    assert again["steps"] == 3


def test_weights_in_a_file_may_lack_a_buffer_but_no_parameter(tmp_path) -> None:
    task = source("regression", optimizer="adamw")
    train(1, task, tmp_path / "first", steps=2, workers=1, **EVEN)
    file = tmp_path / "model.safetensors"
    assert main(["checkpoint", "convert", str(tmp_path / "first"), "--to", str(file)]) == 0
    for left_out in ("layers.1.running_mean", "layers.4.bias"):
        tensors = safetensors.torch.load_file(file)
        del tensors[left_out]
        safetensors.torch.save_file(tensors, file)
        run = tmp_path / left_out
        assert main(["checkpoint", "convert", str(run / "checkpoints"), "--from", str(file)]) == 0
        settings = {"layout": "Layout(shard=2)", "run_dir": str(run), "resume": True, **EVEN}
        if left_out.endswith("bias"):
            with pytest.raises(ChildFailed, match=r"tensor 'model/layers.4.bias' .* is not in the checkpoint"):
                train(2, task, run, workers=2, **settings)
        else:
            assert train(2, task, run, steps=2, workers=2, **settings)["steps"] == 2


@pytest.mark.long
def test_the_hash_of_a_checkpoint_is_the_same_whatever_wrote_it(tmp_path) -> None:
    """Nothing is learned here: they are the first weights."""
    task, found = source("regression", optimizer="sgd", norm=False), set()
    for workers, layout in WAYS:
        run = tmp_path / f"{workers}-{layout}"
        told = train(workers, task, run, steps=1, lr=1e-30, workers=workers, layout=layout, **EVEN)
        opened = open_newest(run / "checkpoints", lambda damage: pytest.fail(str(damage)))
        assert fingerprint_of(opened) == told["weights_sha256"]
        found.add(told["weights_sha256"])
    assert len(found) == 1
