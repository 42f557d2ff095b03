"""Values are written and read in one notation, and nothing that is read is executed."""

import contextlib
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono import notation
from unisono.bad_steps import BAD_STEPS, RollBack, Skip, Stop
from unisono.compress import COMPRESSORS, Auto, ByName, BySize, Cast, Exact, Quantize, WithErrorFeedback
from unisono.config import NOTED
from unisono.data import LOADERS, Inline, Processes, Threads
from unisono.errors import InvalidInput
from unisono.layout import LAYOUTS, Layout
from unisono.layout.split_styles import STYLES
from unisono.sync import SYNCHRONIZERS, AllReduce
from unisono.tasks.lr_schedules import SCHEDULES, Constant, Cosine, Linear

COUNT, FACTOR = st.integers(1, 10**12), st.floats(0, 1)
SIMPLE = (
    st.builds(Cast, st.sampled_from(["fp32", "bf16", "fp16"]))
    | st.builds(Exact, st.integers(8, 48))
    | st.builds(Quantize, st.sampled_from([8, 4]), st.booleans())
)
COMPRESS = st.recursive(
    SIMPLE,
    lambda inner: (
        st.builds(BySize, COUNT, inner, inner)
        | st.builds(ByName, st.lists(st.tuples(st.text(max_size=5), inner), max_size=3).map(tuple), inner)
        | st.builds(WithErrorFeedback, inner)
    ),
    max_leaves=5,
)
LAYOUT = st.builds(
    Layout,
    shard=st.integers(1, 8),
    tensor=st.integers(2, 8),
    plan=st.dictionaries(st.text(max_size=12), st.sampled_from(STYLES), max_size=4),
)
VALUES = {
    "sync": st.builds(AllReduce, bucket_bytes=COUNT, first_bytes=COUNT),
    "compress": COMPRESS,
    "layout": LAYOUT,
    "schedule": st.builds(Constant, COUNT) | st.builds(Linear, COUNT, FACTOR) | st.builds(Cosine, COUNT, FACTOR),
    "bad_step": st.just(Stop())
    | st.builds(Skip, spike=st.floats(1e-3), limit=COUNT, within=COUNT)
    | st.builds(RollBack, limit=COUNT, before=st.integers(0, 9)),
    "load": st.just(Inline()) | st.builds(Threads, COUNT) | st.builds(Processes, COUNT, COUNT),
}
NAMES = {**BAD_STEPS, **SYNCHRONIZERS, **COMPRESSORS, **LAYOUTS, **SCHEDULES, **LOADERS}


def test_every_noted_field_has_its_strategy() -> None:
    assert VALUES.keys() == NOTED.keys()


@pytest.mark.parametrize("field", NOTED)
@given(st.data())
def test_what_is_shown_is_read_back(field, data) -> None:
    value = data.draw(VALUES[field])
    assert notation.parse(field, notation.show(value), NOTED[field]) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [("Exact", Exact()), (" Exact( ) ", Exact()), ("Exact(32)", Exact(32)), ("Exact(fraction_bits=32)", Exact(32)),
     ("Cast('bf16')", Cast("bf16")), ("Cosine(floor=1e-1, warmup=5)", Cosine(5, 0.1)), ("Cast()", Cast()),
     ("ByName((('a', Cast), ('b', BySize(2))), Exact)", ByName((("a", Cast()), ("b", BySize(2))), Exact())),
     ("Auto((Cast,), gain=0.2)", Auto((Cast(),), gain=0.2))],
)  # fmt: skip
def test_values_may_be_written_in_several_ways(text, value) -> None:
    assert notation.parse("compress", text, NAMES) == value


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Exact(), "Exact()"),
        (Exact(40), "Exact()"),
        (Cast("bf16"), "Cast(to='bf16')"),
        (Cosine(3), "Cosine(warmup=3)"),
        (ByName((("a", Cast()),)), "ByName(rules=(('a', Cast()),))"),
        (Auto((Cast(),)), "Auto(candidates=(Cast(),))"),
        (Layout(tensor=2, plan={"a.*": "row"}), "Layout(tensor=2, plan={'a.*': 'row'})"),
    ],
)
def test_what_equals_the_default_is_not_shown(value, text) -> None:
    assert notation.show(value) == text


def test_a_mapping_is_a_value_in_any_order() -> None:
    one = Layout(tensor=2, plan={"a": "row", "b": "column"})
    other = notation.parse("layout", "Layout(plan={'b': 'column', 'a': 'row'}, tensor=2)", LAYOUTS)
    assert one == other
    assert hash(one) == hash(other)
    assert one != Layout(tensor=2, plan={"a": "row"})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "Layout(tensor=2, plan={'a': 'diagonal'})",
            "plan: 'a': 'diagonal' is not one of column, row",
        ),
        ("Layout(tensor=2, plan={'a': []})", "plan: 'a': [] is not one of column"),
        ("Layout(tensor=2, plan='a')", "plan='a' is not a mapping of module names to styles"),
        ("Layout(plan={'a': 'row'})", "splits matrices over tensor workers, but tensor=1"),
    ],
)
def test_a_plan_is_checked_as_far_as_it_can_be_without_a_model(text, words) -> None:
    with pytest.raises(InvalidInput) as caught:
        notation.parse("layout", text, LAYOUTS)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Exat()", "Exat is not a listed name; did you mean Exact?"),
        ("Exact(9, 10)", r"; it is written Exact(fraction_bits=40)."),
        ("Exact(fraction_bits=99)", "fraction_bits=99 is not a whole number from 8 to 48; it is written"),
        ("Exact(bits=3)", "unexpected keyword argument 'bits'"),
        ("Exact(40", "not a literal call ("),
        ("", "not a literal call ("),
        ("40", "not a literal call; write for instance"),
        ("[Exact()]", "not a literal call"),
        ("Exact(*[40])", "* and ** cannot be unpacked here"),
        ("Exact(**{'fraction_bits': 40})", "* and ** cannot be unpacked here"),
        ("Exact(open)", "open is not a listed name"),
        ("Exact(open('x'))", "open is not a listed name"),
        ("__import__('os').system('true')", "__import__('os').system is not a listed name"),
        ("Exact.__class__()", "Exact.__class__ is not a listed name"),
        ("Exact().bound", "not a literal call"),
        ("Exact([x for x in ()])", "[x for x in ()] is neither a literal nor a listed name"),
        ("Exact(lambda: 1)", "neither a literal nor a listed name"),
        ("Exact(f'{1}')", "neither a literal nor a listed name"),
        ("ByName((('a', open),))", "open is not a listed name"),
        ("ByName((('a', open('x')),))", "open is not a listed name"),
        ("ByName((*(1, 2),))", "neither a literal nor a listed name"),
        ("Exact(2 ** 9)", "2 ** 9 is neither a literal nor a listed name"),
        ("Exact((y := 40))", "neither a literal nor a listed name"),
        ("Exact({[]: 1})", "[] is not text, as the keys of a mapping have to be"),
        ("Exact({1: 1})", "1 is not text, as the keys of a mapping have to be"),
        ("Exact({**{}})", "** is not text, as the keys of a mapping have to be"),
        ("Exact({'a': 1, 'a': 2})", "'a' is written twice; write it once"),
        ("Exact({'a': open})", "open is not a listed name"),
        ("Exact(40); Exact()", "not a literal call ("),
        ("Ex\0act()", "not a literal call ("),
    ],
)
def test_everything_else_is_refused_in_one_sentence(text, words) -> None:
    with pytest.raises(InvalidInput) as caught:
        notation.parse("compress", text, COMPRESSORS)
    assert str(caught.value).startswith("compress = ")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value).replace(text, "")


@pytest.mark.parametrize("count", [150, 900, 100_000])
@pytest.mark.parametrize(("opening", "closing"), [("(", ")"), ("[", "]"), ("Exact(", ")"), ("-", ""), ("{1:", "}")])
def test_nesting_without_end_is_refused(opening, closing, count) -> None:
    with pytest.raises(InvalidInput, match="compress = "):
        notation.parse("compress", f"Exact({opening * count}1{closing * count})", COMPRESSORS)


@given(st.text(alphabet="Exact()[]{}=,.*-0123456789'\"\\ \n:#\0lmbdo_", max_size=60))
def test_any_text_is_a_value_or_invalid_input(text) -> None:
    with contextlib.suppress(InvalidInput):
        assert type(notation.parse("compress", text, COMPRESSORS)) in COMPRESSORS.values()


@dataclass(frozen=True)
class Own(Cast):
    """A compressor that does not come with the library."""


@pytest.mark.parametrize("value", [Own(), WithErrorFeedback(Own()), ByName((("a", Own()),)), Auto((Cast(), Own()))])
def test_a_class_that_the_reader_lacks_is_not_written(value) -> None:
    with pytest.raises(InvalidInput, match=r"^compress = .*is not known there.*use Cast, Exact"):
        notation.write("compress", value, COMPRESSORS)
    text = notation.write("compress", value, {**COMPRESSORS, "Own": Own})
    assert notation.parse("compress", text, {**COMPRESSORS, "Own": Own}) == value


class Bits(int):
    """Looks like a number, and is not written as one."""

    def __repr__(self) -> str:
        return "Bits(4)"


def test_what_is_no_literal_is_not_written() -> None:
    with pytest.raises(InvalidInput, match="an argument is not a literal"):
        notation.write("compress", ByName((("a", Quantize(Bits(4))),)), COMPRESSORS)
