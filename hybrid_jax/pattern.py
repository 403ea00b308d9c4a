"""The pattern string: one character a sublayer, each a pre-norm residual block.

    *  MLA (multi-head latent attention)     G  Gated DeltaNet
    M  the mixer named by model.mixer        K  Kimi Delta Attention
    -  SwiGLU MLP                            S  Mamba2
    A  grouped-query attention

`E` (mixture of experts), `|` (pipeline cut) and `/` (multi-token prediction) are reserved. A *layout* is a
pattern whose `M` has been replaced, so that it names every sublayer's kind by itself. No jax here.
"""

import functools

from hybrid_jax.errors import UserError

MIXERS = {"gdn": "G", "kda": "K", "mamba2": "S"}
NAMES = {"*": "MLA", "A": "GQA", "G": "GDN", "K": "KDA", "S": "Mamba2", "-": "MLP"}
RESERVED = {
    "E": "mixture of experts",
    "|": "a pipeline cut",
    "/": "multi-token prediction",
}
_VALID = "* (MLA), M (the mixer of model.mixer), - (MLP), G (GDN), K (KDA), S (Mamba2), A (GQA)"


def check(pattern: str) -> None:
    """Raises UserError for an empty pattern and for the first symbol that is not one of `* M - G K S A`."""
    if not pattern:
        raise UserError("config.model.pattern: empty; give one such as '*-M-M-M-', or num_layers (and attention_ratio)")
    for position, symbol in enumerate(pattern, start=1):
        if symbol in RESERVED:
            raise UserError(
                f"config.model.pattern: {symbol!r} at position {position} is reserved for "
                f"{RESERVED[symbol]}, which is not built yet; valid symbols are {_VALID}"
            )
        if symbol != "M" and symbol not in NAMES:
            raise UserError(
                f"config.model.pattern: unknown symbol {symbol!r} at position {position}; valid symbols are {_VALID}"
            )


@functools.lru_cache(maxsize=64)
def resolve(pattern: str, mixer: str) -> str:
    """The layout of `pattern`: `M` becomes `G`, `K` or `S` after `mixer` ("gdn", "kda" or "mamba2").

    Raises UserError for a bad symbol or mixer.
    """
    check(pattern)
    if mixer not in MIXERS:
        raise UserError(f"config.model.mixer: unknown mixer {mixer!r}; choose one of {', '.join(MIXERS)}")
    return pattern.replace("M", MIXERS[mixer])


def derive(num_layers: int, attention_ratio: float) -> str:
    """A pattern of `num_layers` sublayers in which about `attention_ratio` of the mixers are MLA.

    Mixers and MLPs alternate, so half of the sublayers are mixers, of which int(mixers * attention_ratio) are
    MLA, spread evenly from the first on: the rule of AMD Primus' HybridStack. Where that one silently drops a
    sublayer (an odd number) or all attention (a positive ratio of too few), this one raises.

    Raises UserError for these two and for a ratio outside [0, 1].
    """
    if num_layers < 2 or num_layers % 2:
        raise UserError(
            f"config.model.num_layers: {num_layers} sublayers cannot alternate mixer and MLP; "
            "give a positive even number, or write the pattern out in config.model.pattern"
        )
    if not 0.0 <= attention_ratio <= 1.0:
        raise UserError(
            f"config.model.attention_ratio: {attention_ratio} is not in [0, 1]; it is a share of the mixers"
        )
    pairs = num_layers // 2
    attention = int(pairs * attention_ratio)
    linear = pairs - attention
    if attention == 0:
        if attention_ratio > 0.0:
            raise UserError(
                f"config.model.num_layers: {num_layers} is too small for attention_ratio {attention_ratio}: "
                f"{pairs} mixers * {attention_ratio} leaves no attention; "
                "raise either, or set attention_ratio to 0"
            )
        return "M-" * linear
    if attention <= linear:  # not attention_ratio <= 0.5: that would add sublayers for 3 mixers at 0.6
        run, left_over = divmod(linear, attention)
        return ("*-" + "M-" * run) * attention + "M-" * left_over
    return "*-" * (attention - linear) + "*-M-" * linear


@functools.lru_cache(maxsize=64)
def period(layout: str) -> tuple[str, int, str]:
    """(unit, repeats, tail) with layout == unit * repeats + tail and the fewest sublayers in unit and tail
    together.

    The model scans over the repeats and unrolls the tail, so this is what has to be compiled. Ties go to the
    shorter unit; a layout that does not repeat is one unit, once.
    """
    best = (len(layout), layout, 1, "")
    for size in range(1, len(layout) // 2 + 1):
        unit = layout[:size]
        repeats = 1
        while layout.startswith(unit, repeats * size):
            repeats += 1
        tail = layout[repeats * size :]
        if repeats > 1 and size + len(tail) < best[0]:
            best = (size + len(tail), unit, repeats, tail)
    return best[1:]


def draw(layout: str, width: int = 100) -> str:
    """One line for people: `embed > 3 x [MLA MLP GDN MLP GDN MLP GDN MLP] > norm > head`.

    Where the names would not fit into `width` characters the symbols stand for themselves.
    """

    def block(symbols: str, named: bool) -> str:
        return " ".join(NAMES[s] for s in symbols) if named else symbols

    unit, repeats, tail = period(layout)
    for named in (True, False):
        parts = ["embed", f"{repeats} x [{block(unit, named)}]" if repeats > 1 else block(unit, named)]
        parts += [block(tail, named)] if tail else []
        line = " > ".join([*parts, "norm", "head"])
        if len(line) <= width:
            break
    return line
