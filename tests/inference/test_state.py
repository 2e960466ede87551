"""Fields of dataclasses as states, and back: to the bit, or refused in one line."""

import enum
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final

import pytest
import torch
from torch import Tensor

from dustmap.inference import Layout, State, StateReader, state_of
from dustmap.inference._state import REBUILT
from tests.inference.checkpointers import MemoryCheckpointer, same_bits


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Step:
    gain: float
    accepted: bool
    parameters: tuple[float, ...] = ()


@dataclass(frozen=True)
class Gain:
    gain: float


@dataclass(frozen=True, eq=False)
class Inner:
    values: Annotated[Tensor, Layout("x", "N")]
    step: Step | None = None


@dataclass(frozen=True, eq=False)
class Whole:
    count: int
    name: str
    colour: Colour
    matrix: Annotated[Tensor, Layout("x", "N M")]
    steps: list[Step]
    inner: Inner
    pairs: list[tuple[Annotated[Tensor, Layout("x", "N")], float]]
    summary: Mapping[str, Any]
    part: State
    model: Annotated[object, REBUILT]
    flags: Annotated[Tensor, Layout("x", "N", dtype=torch.bool)] | None = None
    other: Inner | None = None
    precise: Annotated[Tensor, Layout("x", "", any_dtype=True)] | None = None
    limit: float | None = None


N, M = 3, 2
LIKE: Final = {"x": torch.zeros(0)}


def whole() -> Whole:
    x = torch.arange(float(N)) / 7.0
    return Whole(
        count=-4,
        name="ν",
        colour=Colour.BLUE,
        matrix=torch.arange(float(N * M)).reshape(M, N).mT / 3.0,
        steps=[Step(0.1, True, (1.0, math.pi)), Step(-math.inf, False)],
        inner=Inner(x, Step(1e-300, True)),
        pairs=[(x + 1.0, 0.5), (x + 2.0, 0.25)],
        summary={"status": "done", "list": [1, 2.5, None], "nested": {"a": True}},
        part=state_of("part", Inner(2.0 * x)),
        model=object(),
        flags=x > 0.1,
        precise=torch.tensor(1.0 / 3.0, dtype=torch.float64),
    )


def stored(value: Whole) -> StateReader:
    """Through JSON and bytes, as files are."""
    checkpointer = MemoryCheckpointer()
    checkpointer.finish(state_of("whole", value, finished=True))
    state = checkpointer.load()
    assert state is not None
    return StateReader.of(state, "whole")


def test_a_state_comes_back_to_the_bit() -> None:
    value = whole()
    reader = stored(value)
    again = Whole(model=value.model, **reader.fields(Whole, LIKE, N=N))
    assert reader.finished
    same_bits(replace(again, part=State()), replace(value, part=State()))
    part = StateReader.of(again.part, "part").read(Inner, LIKE, N=N)
    same_bits(part, Inner(2.0 * value.inner.values))
    assert again.matrix.stride() == value.matrix.stride() == (1, N)
    assert type(again.steps) is list
    assert type(again.steps[0].parameters) is tuple


def test_states_of_before_a_field_have_none_of_it() -> None:
    state = stored(whole()).state
    values = json.loads(json.dumps(state.values))
    del values["fields"]["limit"], values["fields"]["inner"]["step"]
    fields = StateReader.of(State(values, state.arrays), "whole").fields(Whole, LIKE, N=N)
    assert "limit" not in fields
    assert fields["inner"].step is None
    del values["fields"]["count"]
    with pytest.raises(ValueError, match="the state of whole has no count"):
        StateReader.of(State(values, state.arrays), "whole").fields(Whole, LIKE, N=N)


def test_several_records_share_a_state() -> None:
    step, inner = Step(0.5, False), Inner(torch.ones(N))
    reader = StateReader.of(state_of("both", step, inner), "both")
    assert not reader.finished
    same_bits(reader.read(Inner, LIKE), inner)
    with pytest.raises(ValueError, match=r"^checkpoint: the state of both has no count; .* anew$"):
        reader.read(Whole, LIKE)
    assert reader.read(Step) == step


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("count", 1.5, r"count = 1\.5"),
        ("count", True, r"count = True"),
        ("name", None, r"name = None"),
        ("colour", "green", r"colour = 'green'"),
        ("steps", [{"gain": 1.0, "accepted": 1, "parameters": []}], r"steps\.0\.accepted = 1"),
        ("steps", [{"gain": 1.0}], r"no steps\.0\.accepted"),
        ("inner", None, r"inner = None"),
        ("matrix", None, r"matrix = None"),
        ("pairs", [["array"]], r"pairs\.0 = \['array'\]"),
        ("summary", 3, r"summary = 3"),
    ],
)
def test_values_of_other_types_are_refused(name: str, wrong: object, message: str) -> None:
    state = stored(whole()).state
    values = json.loads(json.dumps(state.values))
    values["fields"][name] = wrong
    reader = StateReader.of(State(values, state.arrays), "whole")
    expected = rf"^checkpoint: the state of whole has {message}; it belongs to another computation"
    with pytest.raises(ValueError, match=expected):
        reader.fields(Whole, LIKE, N=N)


def test_arrays_of_other_shapes_and_types_are_refused() -> None:
    value = whole()
    reader = stored(value)
    expected = r"^checkpoint: matrix of whole must have shape \(4, any\) in torch.float32, got \(3,"
    with pytest.raises(ValueError, match=expected):
        reader.fields(Whole, LIKE, N=4)
    with pytest.raises(ValueError, match=r"must have shape .* in torch\.float64, got .*float32"):
        reader.fields(Whole, {"x": torch.zeros(0, dtype=torch.float64)})
    # Lengths of one name are one, even where none is given.
    short = stored(replace(value, inner=Inner(torch.ones(N + 1))))
    with pytest.raises(ValueError, match=r"inner\.values of whole must have shape \(3\)"):
        short.fields(Whole, LIKE)
    gone = State(reader.state.values, {"matrix": reader.state.arrays["matrix"]})
    with pytest.raises(ValueError, match=r"^checkpoint: the state of whole has no inner\.values"):
        StateReader.of(gone, "whole").fields(Whole, LIKE)


def test_records_of_one_state_have_different_fields() -> None:
    with pytest.raises(TypeError, match="two records have a field gain"):
        state_of("both", Gain(0.5), Step(0.5, False))


def test_states_of_something_else_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expected a state of whole, got one of part; .* anew$"):
        StateReader.of(whole().part, "whole")
    with pytest.raises(ValueError, match="expected a state of whole, got one of None"):
        StateReader.of(State(), "whole")
    with pytest.raises(ValueError, match=r"^checkpoint: the state of whole has fields = None; "):
        StateReader.of(State({"what": "whole"}), "whole").read(Step)


def test_what_cannot_be_stored_is_named() -> None:
    value = replace(whole(), summary={"model": object()})
    with pytest.raises(TypeError, match=r"^summary\.model: a object cannot be stored: annotate"):
        state_of("whole", value)
