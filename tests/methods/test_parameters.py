"""What every parameter of every method promises: a value of the wrong type or size is refused, whoever gives it.

A new method, and a new parameter of an old one, get all of this for nothing.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

import ctxext
from ctxext.errors import CtxextError, InvalidParameterError
from ctxext.measuring.readings import named_method
from ctxext.methods import METHODS, Method, known_methods
from ctxext.methods.parameters import MOST, Parameter, parameters_of
from ctxext.quantities import parameter_of
from ctxext.spec import RopeSpec
from tests._models import tiny

ROPE = RopeSpec(rotary_dim=32, base=10000.0, trained_length=64)
EACH = [(name, parameter) for name, cls in known_methods().items() for parameter in parameters_of(cls).values()]
FLAGS = [(name, parameter.name) for name, parameter in EACH if bool in parameter.kinds]
LISTS = [(name, parameter.name) for name, parameter in EACH if parameter.items]

NEVER = (math.nan, math.inf, -math.inf, 10**31, 1e31, 10**5000, -1, {}, b"8", object(), [], [math.nan], [True], [[2]])


def bad_values(parameter: Parameter) -> list[Any]:
    """What a parameter must not take."""
    found: list[Any] = [*NEVER, ["8"], [None]]
    found += [] if parameter.optional else [None]
    found += [] if bool in parameter.kinds else [True, False, np.True_]
    found += [] if parameter.items else [[8], (8,)]
    if bool in parameter.kinds:
        found += ["False", "false", "no", "0", "", 0, 1, 1.0]
    elif str in parameter.kinds:
        found += [8, 8.5, "8", ""]
    elif parameter.choices:
        found += ["8", "", parameter.choices[0].upper(), *([] if int in parameter.kinds else [8])]
    else:
        found += ["8", "nan", "a", ""]
    if int in parameter.kinds:
        found += [2.5, np.float32(2.5), int(MOST if parameter.range.most is None else parameter.range.most) + 1]
    return found


def with_value(name: str, parameter: str, value: Any) -> Method:
    return replace(known_methods()[name].example(ROPE), **{parameter: value})


@pytest.mark.parametrize(("name", "parameter"), EACH, ids=lambda one: getattr(one, "name", one))
def test_a_wrong_value_is_refused_in_a_sentence(name: str, parameter: Parameter) -> None:
    taken = []
    for value in bad_values(parameter):
        try:
            found = with_value(name, parameter.name, value)
        except CtxextError as error:
            said = str(error)
            assert parameter.name in said
            assert len(said.split(". ")[0].split()) <= 40
            assert len(said) < 400
        else:
            taken.append((value, getattr(found, parameter.name)))
    assert taken == []


def test_there_are_parameters_of_every_kind() -> None:
    assert len(EACH) > 70
    assert len(FLAGS) >= 6
    assert len(LISTS) >= 4
    assert any(parameter.choices for _, parameter in EACH)


@pytest.mark.parametrize(("name", "flag"), FLAGS)
def test_a_flag_is_spelt_on_a_command_line_as_people_spell_it(name: str, flag: str) -> None:
    words = dict.fromkeys(("False", "no", "0", "off"), False) | dict.fromkeys(("True", "yes", "1"), True)
    for text, meant in words.items():
        key, word = parameter_of(f"{flag}={text}")
        assert getattr(with_value(name, key, word), flag) is meant
    with pytest.raises(InvalidParameterError, match=f"{flag} must be True or False, found 'perhaps'"):
        with_value(name, *parameter_of(f"{flag}=perhaps"))


@pytest.mark.parametrize(("name", "parameter"), LISTS)
def test_a_list_can_be_said_everywhere(name: str, parameter: str, tmp_path: Path) -> None:
    """In Python as a list, a tuple or an array's list, as JSON on a command line, in a file, and in a config."""
    if name == "longrope":
        pytest.skip("both of its lists are of one length: see below")
    (file := tmp_path / "list.json").write_text("[2, 4]")
    found = [with_value(name, parameter, given) for given in ([2, 4], (2, 4), np.array([2, 4]).tolist())]
    for text in ("[2,4]", f"@{file}"):
        found.append(with_value(name, *parameter_of(f"{parameter}={text}")))
        found.append(named_method(f"{name} {parameter}={text}", 2.0))
    found.append(known_methods()[name].from_dict(json.loads(json.dumps(found[0].to_dict()))))
    assert [getattr(method, parameter) for method in found] == [(2, 4)] * 8


def test_two_lists_on_a_command_line(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("[1, 2.5]")
    found = named_method(f"longrope short_factor=[1,2] long_factor=@{tmp_path / 'x.json'}", 2.0)
    assert found == METHODS["longrope"](factor=2.0, short_factor=[1, 2], long_factor=(1.0, 2.5))


@pytest.mark.parametrize(
    ("text", "name", "expected"),
    [
        *((f"window={word}", "self_extend", 8.0) for word in ("8", '"8"', "08")),
        ("window=0.25", "self_extend", 0.25),
        ("group=4", "self_extend", 4),
        *((f"group={word}", "self_extend", None) for word in ("None", "null")),
        ("temperature=none", "rerope", "none"),
        ("ramp=turns", "yarn", "turns"),
        ("groups=llama-3-8b", "dpe", "llama-3-8b"),
        ("base=1e6", "abf", 1e6),
    ],
)
def test_a_word_is_read_as_its_parameter_takes_it(text: str, name: str, expected: object) -> None:
    key, word = parameter_of(text)
    found = getattr(with_value(name, key, word), key)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("yarn beta_fast=16 beta_fast=8", "beta_fast is given twice, as 16 and as 8"),
        ("self_extend window=nan", "window must be a finite number, above 0, found 'nan'|found nan"),
        *(
            (f"self_extend window={word}", re.escape(f"window must be a finite number, above 0, found '{word}'"))
            for word in ("1_000", "[8]", "true")
        ),
        ("self_extend thinning=a", "thinning must be a finite number from 0 to 1, or None, found 'a'"),
        ("self_extend group=2.0", "group must be a whole number of tokens, at least 1, or None, found '2.0'"),
        ("t5_bias buckets=9e12", "buckets must be a whole number from 2 to 65,536, found '9e12'"),
        ("t5_bias buckets=9000000000000", "buckets must be at most 65,536, found 9000000000000"),
        ("dpe groups=[2,0]", r"groups\[1\] must be a whole number of tokens, at least 1, found 0"),
        ("dpe groups=[2,", "groups"),
        ("yarn factor=" + "9" * 5000, "factor must be"),
        ("dpe groups=" + "[" * 5000, "groups"),
        ('yarn "', "quotation"),
        ("yarn 'ramp=turns", "quotation"),
        ("yarn ramp=turns\\", "escape"),
        ("yarn ramp", "--param must be KEY=VALUE"),
        ("yarn ramp=@/no/such/file", "ramp: there is no file"),
    ],
)
def test_what_cannot_be_read_is_refused_in_a_sentence(text: str, said: str) -> None:
    with pytest.raises(CtxextError, match=said) as refusal:
        named_method(text, 2.0)
    assert len(str(refusal.value)) < 400


def test_a_file_that_is_no_json_is_refused(tmp_path: Path) -> None:
    for number, content in enumerate((b"[1, 2", b"\xff\xfe\x00", b"False")):
        path = tmp_path / f"{number}.json"
        path.write_bytes(content)
        with pytest.raises(InvalidParameterError, match="is not JSON"):
            parameter_of(f"groups=@{path}")


HUGE = 10**5000


def named(value: object) -> str:
    return "huge" if value is HUGE else repr(value)[:8]


@pytest.mark.parametrize("name", ["factor", "target_length", "trained_length"])
@pytest.mark.parametrize("value", [math.nan, math.inf, 0, -1, 10**30, 1e30, HUGE, "8", True, [8], b"8"], ids=named)
def test_how_far_to_reach_is_checked_like_a_parameter(name: str, value: Any) -> None:
    model = tiny()
    before = model.config.to_dict()
    given = {"factor": 2.0} if name == "trained_length" else {}
    with pytest.raises(InvalidParameterError, match=name) as refusal:
        ctxext.patch(model, "yarn", **{**given, name: value})
    assert len(str(refusal.value)) < 400
    assert model.config.to_dict() == before


def test_a_target_and_a_reach_may_say_the_same() -> None:
    assert ctxext.describe(ctxext.patch(tiny(), "dynamic_ntk", target_length=128, reach=2.0)).target_length == 128


def test_numbers_of_numpy_are_numbers() -> None:
    found = METHODS["self_extend"](factor=np.float32(2), window=np.int64(8), group=np.int64(4))
    same = METHODS["self_extend"](factor=2, window=8, group=4)
    assert (found, json.dumps(found.to_dict())) == (same, json.dumps(same.to_dict()))


def test_an_annotation_that_cannot_be_checked_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"The parameter where is annotated with .*Tensor"):
        Parameter.of("where", torch.Tensor)
    assert Parameter.of("ramp", Literal["a", "b", "c"] | None).checked("b") == "b"
    assert str(Parameter.of("ramp", Literal["a", "b", "c"] | None)) == "'a', 'b' or 'c', or None"
