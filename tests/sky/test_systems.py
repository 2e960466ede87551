"""Extinction systems, and the published factors between them."""

import math

import pytest

from dustmap.sky.systems import conversion, known_systems, system_named

NAMES = ["A_V", "E(ZGR23)", "A0", "A_V_542", "A0_550", "A_G", "A_BP", "A_RP", "A_Ks"]
NAMES += ["E(B-V)", "E(B-V)_SFD", "Bayestar19", "e-folding_G"]


def factor(source: str, target: str) -> float:
    return conversion(system_named(source), system_named(target))


def test_the_table_names_every_system_and_where_it_is_from() -> None:
    assert sorted(known_systems()) == sorted(NAMES)
    for name, system in known_systems().items():
        assert system.name == name
        assert str(system) == name
        assert system.meaning
        assert system.reference
        assert system.per_a_v is not None


@pytest.mark.parametrize(
    ("source", "target", "published"),
    [
        ("E(ZGR23)", "A_V", 2.8),
        ("E(ZGR23)", "A0_550", 2.6798),
        ("E(ZGR23)", "A_G", 2.2732),
        ("E(ZGR23)", "A_BP", 3.0362),
        ("E(ZGR23)", "A_RP", 1.6480),
        ("E(ZGR23)", "A_Ks", 0.26954),
        ("E(B-V)", "A0", 3.1),
        ("E(B-V)", "A_V_542", 3.1),
        ("E(B-V)_SFD", "A_V", 2.742),
        ("Bayestar19", "E(B-V)", 0.884),
        ("e-folding_G", "A_G", 2.5 * math.log10(math.e)),
    ],
)
def test_published_factors_come_back(source: str, target: str, published: float) -> None:
    assert factor(source, target) == pytest.approx(published, rel=1e-12)


def test_conversions_are_a_group() -> None:
    for a in NAMES:
        assert factor(a, a) == 1.0
        for b in NAMES:
            assert factor(a, b) * factor(b, a) == pytest.approx(1.0, rel=1e-12)
            through = factor(a, "E(B-V)") * factor("E(B-V)", b)
            assert factor(a, b) == pytest.approx(through, rel=1e-12)


def test_band_values_say_that_they_depend_on_the_spectrum() -> None:
    for name in ("A_G", "A_BP", "A_RP"):
        assert "spectrum" in system_named(name).meaning


def test_a_custom_system_converts_to_nothing_but_itself() -> None:
    own = system_named("custom:my band")
    assert own.name == "custom:my band"
    assert conversion(own, system_named("custom:my band")) == 1.0
    for pair in ((own, system_named("A_V")), (system_named("A_V"), own)):
        with pytest.raises(ValueError, match=r"custom:my band is a custom system.*convert"):
            conversion(*pair)
    with pytest.raises(ValueError, match="custom"):
        conversion(own, system_named("custom:another"))


@pytest.mark.parametrize("name", ["", "extinction", "custom:", "custom: ", "E(B−V)"])
def test_what_is_no_system_is_refused_with_the_choices(name: str) -> None:
    with pytest.raises(ValueError, match=r"expected an extinction system") as caught:
        system_named(name)
    for known in (*NAMES, "custom:NAME"):
        assert known in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_near_miss_gets_a_suggestion() -> None:
    with pytest.raises(ValueError, match=r"did you mean A_V\?"):
        system_named("AV")
