"""The adapter of lm-evaluation-harness: its requests against tests/teacher.py, whose every token is forced by hand."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

from hybrid_jax import progress, sharding
from hybrid_jax.config import MeshConfig
from hybrid_jax.data.tokenizer import BpeTokenizer
from hybrid_jax.decoding.sampling import Sampling
from hybrid_jax.errors import UserError
from hybrid_jax.evaluation import library
from hybrid_jax.evaluation.scoring import Scorer
from hybrid_jax.model import Model
from tests import teacher
from tests.models import drawn
from tests.tiny import tiny_config

pytestmark = pytest.mark.lm_eval

WINDOW = 64
CFG = tiny_config("/nonexistent", model__pattern="A-", model__vocab_size=320)
MODEL = Model(CFG.model, "chunked", "float32", "chunked")
TEXT = "The river runs past the mill. The miller's house is old, and the river is older. What runs past? "


def bpe(size=300, text=TEXT):
    """A byte-level BPE of a text, by default the one above."""
    found = tokenizers.Tokenizer(tokenizers.models.BPE())
    found.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size - 1,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        special_tokens=[],
    )
    found.train_from_iterator([text * 3], trainer)
    return BpeTokenizer.from_bpe(found)


@pytest.fixture(scope="module")
def params():
    return jax.tree.map(jnp.asarray, drawn(MODEL))


@pytest.fixture(scope="module")
def lm(params):
    library.prepare([])
    from hybrid_jax.evaluation.harness import CheckpointLM

    mesh = sharding.make_mesh(MeshConfig(), jax.devices()[:1])
    return CheckpointLM(Scorer(MODEL, params, mesh, WINDOW, batch_size=1), bpe(), progress.Line("test"))


def instances(kind, arguments):
    from lm_eval.api.instance import Instance

    return [Instance(request_type=kind, doc={}, arguments=a, idx=i) for i, a in enumerate(arguments)]


def test_loglikelihood_of_every_kind_of_request(lm, params):
    encode = lm.tok_encode
    long = TEXT * 3
    asked = [
        ("The river", " runs past the mill."),
        ("", "The river runs"),
        ("The river ", "is older"),  # the space goes with what follows
        ("The river   ", "  is older"),
        ("What runs past?\n", "river"),
        ("The miller's house", " is old"),
        ("The river", " runs past the mill."),
        (long, " The river"),
        (long, " is"),
        ("The river runs past", " the"),
        ("The river runs past", " mill"),
        ("Á", " ñandú"),  # of bytes alone
    ]
    got = lm.loglikelihood(instances("loglikelihood", asked))
    before, after = encode("The river"), encode("The river runs past the mill.")
    ids = {0: (before, after[len(before) :]), 1: ([lm.eot_token_id], encode("The river runs"))}
    for number, (context, continuation) in enumerate(asked):
        stripped = context.rstrip()  # newlines too
        whole = encode(context + continuation)
        cut = len(encode(stripped))
        given = ids.get(number, (whole[:cut], whole[cut:]))
        want, likeliest = teacher.score(MODEL, params, *given, WINDOW)
        assert got[number][0] == pytest.approx(want, abs=2e-4), asked[number]
        assert got[number][1] == likeliest
        assert len(given[1]) >= 1 and len(set(given[1])) >= 1
    assert len(encode(long)) > WINDOW and lm._scorer.truncated == 2
    assert got[0] == got[6] and len({value for value, _ in got}) == len(asked) - 1


def test_a_continuation_that_joins_the_context(lm, params):
    """'ol' is a token here and 'old' another: nothing of the continuation would be left behind the context's tokens."""
    whole = lm.tok_encode(" is old")
    assert len(whole) <= len(lm.tok_encode(" is ol"))
    ((value, _), (nothing, sure)) = lm.loglikelihood(instances("loglikelihood", [(" is ol", "d"), (" is ol", "")]))
    same = 0
    for a, b in zip(whole, lm.tok_encode(" is ol"), strict=False):
        if a != b:
            break
        same += 1
    assert value == pytest.approx(teacher.score(MODEL, params, whole[:same], whole[same:], WINDOW)[0], abs=2e-4)
    assert (nothing, sure) == (0.0, True)


def test_rolling_is_the_sum_over_all_tokens(lm, params):
    texts = ["The river", TEXT, TEXT * 4, ""]
    got = lm.loglikelihood_rolling(instances("loglikelihood_rolling", [(text,) for text in texts]))
    for text, value in zip(texts, got, strict=True):
        ids = [lm.eot_token_id, *lm.tok_encode(text)]
        want, known = 0.0, 1
        while known < len(ids):  # windows of WINDOW inputs; the last one has all the context that fits
            end = min(known + WINDOW, len(ids)) if known > 1 else min(1 + WINDOW, len(ids))
            start = max(0, end - 1 - WINDOW)
            of_token = teacher.log_p(MODEL, params, ids[start : end - 1], WINDOW)
            want += sum(of_token[i - 1 - start, ids[i]] for i in range(known, end))
            known = end
        assert value == pytest.approx(want, abs=1e-3)
    assert got[3] == 0.0 and got[2] < 2 * got[1] < 0
    assert len(lm.tok_encode(TEXT * 4)) > WINDOW


def test_answers_are_the_greedy_ones_and_end_where_asked(lm, params):
    texts = ["The river", TEXT * 3, "What runs", ""]
    count = 12
    free = {"until": [], "max_gen_toks": count}
    got = lm.generate_until(instances("generate_until", [(text, free) for text in texts]))
    for text, answer in zip(texts, got, strict=True):
        ids = (lm.tok_encode(text) or [lm.eot_token_id])[-(WINDOW - count) :]
        chosen = teacher.greedy(MODEL, params, ids, count, WINDOW, lm.eot_token_id)
        assert answer == lm.tok_decode(chosen)
    assert len(set(got)) > 1 and all(got)
    stop = got[0][3]
    asked = [(texts[0], {"until": [stop, ""], "max_gen_toks": count}), (texts[2], free), (texts[0], free)]
    again = lm.generate_until(instances("generate_until", asked))
    assert again == [got[0][: got[0].index(stop)], got[2], got[0]]
    two = lm.generate_until(instances("generate_until", [(texts[0], {"until": [], "max_new_tokens": 2})]))
    ids = lm.tok_encode(texts[0])
    assert two == [lm.tok_decode(teacher.greedy(MODEL, params, ids, 2, WINDOW, lm.eot_token_id))] != [got[0]]


def test_what_a_task_may_not_ask_for(lm):
    for arguments, said in [
        ({"until": ["."], "max_gen_toks": WINDOW}, "answers of up to 64 tokens, .* window of 64 .* raise --max_length"),
        ({"until": ["."], "max_gen_toks": 4, "num_beams": 5}, "name num_beams, which this decoder has not"),
        ({"max_gen_toks": 4, "do_sample": True, "temperature": -1.0}, "temperature: -1.0"),
    ]:
        with pytest.raises(UserError, match=said):
            lm.generate_until(instances("generate_until", [("The", arguments)]))


def test_how_answers_are_written():
    library.prepare([])
    from hybrid_jax.evaluation.harness import MAX_NEW_TOKENS, _Asked

    greedy = Sampling(temperature=0.0)
    for arguments, tokens, stop, sampling in [
        ({"until": "\n"}, MAX_NEW_TOKENS, ("\n",), greedy),
        ({"until": ["a", ""], "max_tokens": 5, "do_sample": False, "temperature": 0.0}, 5, ("a",), greedy),
        ({"until": [], "do_sample": True, "temperature": 0.7, "top_p": 0.9}, 256, (), Sampling(0.7, top_p=0.9)),
        ({"do_sample": True, "top_k": 3}, 256, (), Sampling(1.0, top_k=3)),
    ]:
        assert _Asked.of(arguments, 1000) == _Asked(tokens, stop, sampling)


def test_progress_counts_what_is_answered(lm, monkeypatch):
    shown = []

    class Line(progress.Line):
        def due(self):
            return True

        def show(self, share, text):
            shown.append((share, text))

    monkeypatch.setattr(lm, "line", Line("test"))
    lm.loglikelihood(instances("loglikelihood", [("The river", " runs"), ("The river", " is older"), ("", "The")]))
    assert [text.split("  ")[0] for _, text in shown] == [f"{i} of 3 requests" for i in (1, 2, 3)]
    shares = [share for share, _ in shown]
    assert shares == sorted(shares) and shares[-1] == 1.0
    assert json.dumps(shares) and np.isfinite(shares).all()
