"""The pattern string: which are valid, what M means, layouts from a ratio, the shortest period."""

import itertools

import pytest

from hybrid_jax import pattern
from hybrid_jax.errors import UserError


@pytest.mark.parametrize(
    ("mixer", "layout"), [("gdn", "*-G-G-K-S-A-"), ("kda", "*-K-G-K-S-A-"), ("mamba2", "*-S-G-K-S-A-")]
)
def test_m_is_the_mixer_and_explicit_symbols_stay(mixer, layout):
    assert pattern.resolve("*-M-G-K-S-A-", mixer) == layout


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("M-x-", ["'x'", "position 3", "* (MLA)", "A (GQA)"]),
        ("m-", ["'m'", "position 1"]),
        ("M- *-", ["' '", "position 3"]),
        ("*-E-", ["'E'", "position 3", "reserved", "mixture of experts"]),
        ("M-|M-", ["'|'", "position 3", "pipeline"]),
        ("M-/M-", ["'/'", "position 3", "multi-token"]),
        ("", ["config.model.pattern", "empty", "num_layers"]),
    ],
)
def test_a_bad_symbol_names_itself_its_place_and_the_valid_ones(text, words):
    with pytest.raises(UserError) as error:
        pattern.resolve(text, "gdn")
    assert all(word in str(error.value) for word in words), str(error.value)


def test_an_unknown_mixer_lists_the_valid_ones():
    with pytest.raises(UserError, match=r"config\.model\.mixer: unknown mixer 'mamba'; choose one of gdn, kda, mamba2"):
        pattern.resolve("M-", "mamba")


# The results that AMD Primus' HybridStack gives for these numbers.
@pytest.mark.parametrize(
    ("num_layers", "ratio", "layout"),
    [
        (24, 0.25, "*-M-M-M-" * 3),
        (32, 0.25, "*-M-M-M-" * 4),
        (56, 0.25, "*-M-M-M-" * 7),
        (64, 0.25, "*-M-M-M-" * 8),
        (24, 0.0, "M-" * 12),
        (8, 0.25, "*-M-M-M-"),
        (16, 0.25, "*-M-M-M-" * 2),
        (14, 0.3, "*-M-M-*-M-M-M-"),  # 7 mixers: 2 attention, 5 linear; runs of 2, and 1 left over
        (8, 0.5, "*-M-*-M-"),
        (8, 0.75, "*-*-*-M-"),  # 3 attention, 1 linear: 2 alone, then 1 pair
        (6, 1.0, "*-*-*-"),
    ],
)
def test_layouts_from_a_ratio(num_layers, ratio, layout):
    assert pattern.derive(num_layers, ratio) == layout


@pytest.mark.parametrize("num_layers", range(2, 66, 2))
def test_a_derived_layout_has_every_sublayer_and_the_right_share_of_attention(num_layers):
    pairs = num_layers // 2
    for ratio in (0.25, 0.3, 0.5, 0.6, 0.75, 1.0):
        if int(pairs * ratio):
            layout = pattern.derive(num_layers, ratio)
            assert len(layout) == num_layers
            assert layout[1::2] == "-" * pairs
            assert layout.count("*") == int(pairs * ratio)


@pytest.mark.parametrize(
    ("num_layers", "ratio", "words"),
    [
        (25, 0.25, "config.model.num_layers: 25"),
        (0, 0.0, "config.model.num_layers: 0"),
        (-4, 0.0, "config.model.num_layers: -4"),
        (6, 0.25, "config.model.num_layers: 6 is too small for attention_ratio 0.25"),
        (8, 1.5, "config.model.attention_ratio: 1.5"),
        (8, -0.1, "config.model.attention_ratio: -0.1"),
    ],
)
def test_counts_that_would_drop_sublayers_are_errors(num_layers, ratio, words):
    with pytest.raises(UserError) as error:
        pattern.derive(num_layers, ratio)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ("G-" * 12, ("G-", 12, "")),
        ("S" * 48, ("S", 48, "")),
        ("*-G-G-G-" * 3, ("*-G-G-G-", 3, "")),
        ("*-G-G-K-S-A-", ("*-G-G-K-S-A-", 1, "")),
        ("*-G-G-*-G-G-G-", ("*-G-G-", 2, "G-")),  # the tail need not begin the unit
        ("*-G-G-G-" * 2 + "*-G-", ("*-G-G-G-", 2, "*-G-")),
        ("G", ("G", 1, "")),
        ("GK", ("GK", 1, "")),
        ("G-G-G-G-*-A-", ("G-", 4, "*-A-")),
    ],
)
def test_the_shortest_period(layout, expected):
    assert pattern.period(layout) == expected


def test_period_is_exact_and_minimal_for_every_short_layout():
    for length in range(1, 8):
        for symbols in itertools.product("*G-", repeat=length):
            layout = "".join(symbols)
            unit, repeats, tail = pattern.period(layout)
            assert unit * repeats + tail == layout
            cost = min(
                [length]
                + [
                    size + length - size * n
                    for size in range(1, length)
                    for n in range(2, length // size + 1)
                    if layout[:size] * n == layout[: size * n]
                ]
            )
            assert len(unit) + len(tail) == cost, layout


def test_the_drawing_is_one_line_and_names_the_kinds():
    assert pattern.draw("*-G-G-G-" * 3) == "embed > 3 x [MLA MLP GDN MLP GDN MLP GDN MLP] > norm > head"
    assert pattern.draw("S" * 48) == "embed > 48 x [Mamba2] > norm > head"
    assert pattern.draw("G-G-*-") == "embed > 2 x [GDN MLP] > MLA MLP > norm > head"
    irregular = "*-G-K-S-A-" + "G-K-*-S-A-" * 2 + "A-A-G-K-*-" * 2
    assert irregular in pattern.draw(irregular, width=80)
