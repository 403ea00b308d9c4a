"""The PyTorch model of an export against the JAX model: logits and gradients; and what PyTorch users do with it."""

import itertools
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from hybrid_jax.config import RopeConfig  # noqa: E402
from hybrid_jax.interop.hybrid import modeling_hybrid, recurrences_hybrid  # noqa: E402
from hybrid_jax.interop.hybrid.modeling_hybrid import HybridCache, HybridForCausalLM  # noqa: E402
from hybrid_jax.model import Model  # noqa: E402
from tests.interop.hybrid_pairs import (  # noqa: E402
    DEMO,
    GDN,
    GQA,
    KDA,
    LLAMA3,
    MAMBA2,
    MLA,
    NONE,
    YARN,
    compiled,
    drawn,
    load,
    model_config,
    tokens,
    torch_model,
    torch_names,
    with_,
)

pytestmark = pytest.mark.torch
torch.set_num_threads(1)  # more only wait for each other on tensors of this size
CACHE = modeling_hybrid._CACHE
LONG = 75  # more than a chunk of 64, and no multiple of 16
CASES = {
    **{symbol: model_config(symbol) for symbol in "*AGKS-"},
    "no rotary channels": model_config("*", mla=with_(MLA, qk_rope_head_dim=0)),
    # The options of every kind, divided over two stacks.
    "options 1": model_config(
        "*AGKS-",
        tie_word_embeddings=False,
        mla=with_(MLA, q_lora_rank=0, rope=YARN, qk_rope_head_dim=8),
        gqa=with_(GQA, qk_norm=True, rope=RopeConfig(rotary_fraction=0.5, theta=500.0)),
        gdn=with_(GDN, use_short_conv=False, allow_neg_eigval=True, num_v_heads=2),
        kda=with_(KDA, lower_bound=-5.0, allow_neg_eigval=True),
        mamba2=with_(MAMBA2, pre_norm=False, conv_size=3, norm_eps=0.0),
    ),
    "options 2": model_config(
        "SK-GA*",
        norm_eps=1e-5,
        mla=with_(MLA, rope=NONE, norm_eps=1e-3),
        gqa=with_(GQA, bias=True, output_gate=True, num_kv_heads=4, rope=LLAMA3),
        gdn=with_(GDN, use_gate=False, expand_v=2.0, norm_eps=1e-3),
        kda=with_(KDA, gate_bias=False, use_short_conv=False, num_v_heads=2, expand_v=1.0),
        mamba2=with_(MAMBA2, n_groups=1, expand=1),
    ),
}


def divergence(got, want):
    """Mean Kullback-Leibler divergence of the next token's distribution, in nats, in float64: it is tiny."""
    got, want = got.double().log_softmax(-1), want.double().log_softmax(-1)
    return (want.exp() * (want - got)).sum(-1).mean()


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_are_those_of_jax(case):
    cfg = CASES[case]
    jax_model = Model(cfg, backend="reference", compute_dtype="float32", attention="reference")
    model = torch_model(cfg)

    def reference(params, ids):
        def loss(params):
            logits = jax_model.logits(params, ids)
            logp = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), ids[:, 1:, None], axis=-1)
            return -jnp.mean(logp), logits

        return jax.value_and_grad(loss, has_aux=True)(params)

    reference = compiled(reference, drawn(jax_model, 0), tokens(0, 2, LONG))
    for seed in range(3):
        params, ids = drawn(jax_model, seed), tokens(seed, 2, LONG)
        (loss, logits), gradients = reference(params, ids)
        load(model, cfg, params)
        model.zero_grad()
        output = model(torch.from_numpy(ids).long(), labels=torch.from_numpy(ids).long())
        output.loss.backward()
        got, want = output.logits.detach(), torch.from_numpy(np.array(logits))
        assert want.std() > 0.2
        torch.testing.assert_close(got, want, atol=1e-4, rtol=0)
        assert divergence(got, want) <= 1e-6
        torch.testing.assert_close(output.loss.detach(), torch.tensor(float(loss)), atol=1e-5, rtol=0)
        parameters = dict(model.named_parameters())
        wanted = torch_names(cfg, gradients)
        assert set(wanted) == set(parameters)
        for name, gradient in wanted.items():
            rms = gradient.square().mean().sqrt()
            error = (parameters[name].grad - gradient).square().mean().sqrt()
            assert rms > 0 and error <= 1e-4 * rms, (name, error / rms)


@pytest.fixture(scope="module")
def demo():
    """PyTorch model, its parameters in JAX, and JAX's logits of parameters and ids [1, 265]: the demo's stack, with
    options that matter to caches."""
    cfg = model_config(
        DEMO, gqa=with_(GQA, output_gate=True, qk_norm=True), mla=with_(MLA, rope=YARN, qk_rope_head_dim=8)
    )
    jax_model = Model(cfg, backend="reference", compute_dtype="float32", attention="reference")
    params, model = drawn(jax_model, 0), torch_model(cfg)
    load(model, cfg, params)
    return model, params, compiled(jax_model.logits, params, tokens(0, 1, 265)), cfg, jax_model


def test_the_demos_logits_are_those_of_jax(demo):
    _, _, reference, cfg, jax_model = demo
    model = torch_model(cfg)
    for seed in range(3):
        params, ids = drawn(jax_model, seed), tokens(seed, 1, 265)
        load(model, cfg, params)
        want = torch.from_numpy(np.array(reference(params, ids)))
        with torch.no_grad():
            got = model(torch.from_numpy(ids).long()).logits
        torch.testing.assert_close(got, want, atol=1e-4, rtol=0)
        assert divergence(got, want) <= 1e-6


@pytest.fixture
def model(demo):
    model = demo[0].eval()
    yield model
    model.eval()


def ids_of(seed, *shape):
    return torch.from_numpy(tokens(seed, *shape)).long()


def logits_of(model, ids, cuts, mask=None, **first):
    """Logits of the parts of ids [B, T] between `cuts`, each part given to the cache after those before."""
    parts, cache = [], None
    for start, end in itertools.pairwise(cuts):
        seen = None if mask is None else mask[:, :end]
        output = model(ids[:, start:end], attention_mask=seen, use_cache=True, **{CACHE: cache})
        cache = output[CACHE]
        parts.append(output.logits)
    return torch.cat(parts, dim=1), cache


@torch.no_grad()
def test_a_cache_continues_where_it_was(model):
    ids = ids_of(1, 2, LONG)
    whole = model(ids).logits
    one_by_one, cache = logits_of(model, ids, range(LONG + 1))
    torch.testing.assert_close(one_by_one, whole, atol=1e-4, rtol=0)
    in_parts, other = logits_of(model, ids, (0, 20, 21, 64, 66, LONG))
    torch.testing.assert_close(in_parts, whole, atol=1e-4, rtol=0)
    assert cache.get_seq_length() == other.get_seq_length() == LONG
    for symbol, state in zip(model.config.layout, cache.states, strict=True):
        names = {"*": {"latent", "k_rope"}, "A": {"k", "v"}, "-": set()}.get(symbol, {"ssm", "conv"})
        assert set(state) == names
        if "ssm" in state:
            assert state["ssm"].dtype == torch.float32


def placed(rows, width, where):
    """Rows of different lengths in [B, width], padded with a token that matters; (ids, mask, columns of each row)."""
    ids, mask = torch.full((len(rows), width), 5), torch.zeros(len(rows), width, dtype=torch.long)
    columns = []
    draw = torch.Generator().manual_seed(0)
    for i, row in enumerate(rows):
        n = len(row)
        anywhere = torch.randperm(width, generator=draw)[:n].sort().values
        columns.append({"left": torch.arange(width - n, width), "right": torch.arange(n), "within": anywhere}[where])
        ids[i, columns[-1]], mask[i, columns[-1]] = row, 1
    return ids, mask, columns


@pytest.mark.parametrize("where", ["left", "right", "within"])
@torch.no_grad()
def test_padding_changes_nothing(model, where):
    rows = [ids_of(i, n) for i, n in enumerate((LONG, 40, 3))]
    alone = [model(row[None], output_hidden_states=True) for row in rows]
    ids, mask, columns = placed(rows, LONG, where)
    output = model(ids, attention_mask=mask, output_hidden_states=True)
    parts, _ = logits_of(model, ids, (0, 33, 60, *range(61, LONG + 1)), mask)
    for i, (single, column) in enumerate(zip(alone, columns, strict=True)):
        torch.testing.assert_close(output.logits[i, column], single.logits[0], atol=2e-5, rtol=0)
        torch.testing.assert_close(parts[i, column], single.logits[0], atol=1e-4, rtol=0)
        for ours, theirs in zip(output.hidden_states, single.hidden_states, strict=True):
            torch.testing.assert_close(ours[i, column], theirs[0], atol=2e-5, rtol=0)
    assert len(output.hidden_states) == len(model.config.layout) + 1


def test_padding_has_no_gradient(model):
    """The loss of padded rows, and its gradients, are those of the rows by themselves."""
    rows = [ids_of(i, n) for i, n in enumerate((LONG, 20))]
    ids, mask, columns = placed(rows, LONG, "left")
    labels = torch.full_like(ids, -100)
    for label, row, column in zip(labels, rows, columns, strict=True):
        label[column[1:]] = row[1:]  # the first token of a row would be padding's to predict
    model.train().zero_grad()
    targets = sum(len(row) - 1 for row in rows)
    alone = sum(model(row[None], labels=row[None]).loss * (len(row) - 1) for row in rows) / targets
    alone.backward()
    want = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    loss = model(ids, attention_mask=mask, labels=labels).loss
    loss.backward()
    torch.testing.assert_close(loss, alone, atol=1e-5, rtol=0)
    for name, p in model.named_parameters():
        error, rms = (p.grad - want[name]).square().mean().sqrt(), want[name].square().mean().sqrt()
        assert rms > 0 and error <= 1e-4 * rms, name


@torch.no_grad()
def test_greedy_generation_takes_what_jax_finds_likeliest(demo):
    model, params, reference, *_ = demo
    prompt = ids_of(3, 1, 9)
    ids = model.generate(prompt, max_new_tokens=256, do_sample=False, eos_token_id=None)
    assert ids.shape == (1, 265)
    logits = np.asarray(reference(params, ids.numpy().astype(np.int32)))[0, 8:-1]
    chosen = np.take_along_axis(logits, ids[0, 9:, None].numpy(), axis=1)[:, 0]
    assert np.all(logits.max(1) - chosen <= 1e-4)  # a tie within rounding may go either way
    assert len(set(ids[0, 9:].tolist())) > 5


@torch.no_grad()
def test_a_padded_batch_generates_what_its_rows_do(model):
    rows = [ids_of(i, n) for i, n in enumerate((30, 17, 2))]
    ids, mask, _ = placed(rows, 30, "left")
    settings = dict(max_new_tokens=12, eos_token_id=None, pad_token_id=5)
    greedy = model.generate(ids, attention_mask=mask, do_sample=False, **settings)
    for i, row in enumerate(rows):
        alone = model.generate(row[None], do_sample=False, **settings)
        assert greedy[i, 30:].tolist() == alone[0, len(row) :].tolist()
    without = model.generate(ids, attention_mask=mask, do_sample=False, use_cache=False, **settings)
    assert greedy.tolist() == without.tolist()
    beams = dict(num_beams=3, do_sample=False, **settings)
    with_cache = model.generate(ids, attention_mask=mask, **beams)
    assert with_cache.tolist() == model.generate(ids, attention_mask=mask, use_cache=False, **beams).tolist()
    torch.manual_seed(0)
    sampled = model.generate(ids, attention_mask=mask, do_sample=True, num_return_sequences=2, **settings)
    assert sampled.shape == (6, 42) and sampled[0].tolist() != sampled[1].tolist()


@torch.no_grad()
def test_generation_goes_on_from_a_cache_and_from_embeddings(model):
    ids = ids_of(4, 2, 10)
    settings = dict(do_sample=False, eos_token_id=None)
    first = model.generate(ids, max_new_tokens=5, return_dict_in_generate=True, **settings)
    cache = first[CACHE]
    assert isinstance(cache, HybridCache) and cache.get_seq_length() == 14
    on = model.generate(first.sequences, max_new_tokens=5, **{CACHE: cache}, **settings)
    assert on.tolist() == model.generate(ids, max_new_tokens=10, **settings).tolist()
    embedded = model.generate(inputs_embeds=model.get_input_embeddings()(ids), max_new_tokens=5, **settings)
    assert embedded.tolist() == first.sequences[:, 10:].tolist()


@torch.no_grad()
def test_rows_of_a_cache_are_picked_and_repeated(model):
    ids, more = ids_of(5, 3, 12), ids_of(6, 1, 4)
    ids, mask, _ = placed([ids[0], ids[1][:7], ids[2]], 12, "left")
    _, cache = logits_of(model, ids, (0, 12), mask)
    rows = torch.tensor([2, 1, 1])
    cache.reorder_cache(rows)
    cache.batch_repeat_interleave(2)
    rows = rows.repeat_interleave(2)
    got = model(more.expand(6, -1), **{CACHE: cache}).logits
    both = torch.cat([mask[rows], torch.ones(6, 4, dtype=torch.long)], dim=1)
    want = model(torch.cat([ids[rows], more.expand(6, -1)], dim=1), attention_mask=both).logits[:, 12:]
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)
    cache.reset()
    assert len(cache) == len(model.config.layout) and cache.get_seq_length() == 0 and cache.real is None
    with pytest.raises(NotImplementedError, match="cannot be taken back"):
        cache.crop(3)


def test_what_is_returned(model):
    ids = ids_of(8, 2, 9)
    whole = model(ids)
    assert whole.loss is None and isinstance(whole[CACHE], HybridCache)
    assert model(ids, use_cache=False).get(CACHE) is None and model.train()(ids).get(CACHE) is None
    model.eval()
    torch.testing.assert_close(model(ids, logits_to_keep=2).logits, whole.logits[:, -2:])
    torch.testing.assert_close(model(ids, logits_to_keep=torch.tensor([0, 4])).logits, whole.logits[:, [0, 4]])
    torch.testing.assert_close(model(inputs_embeds=model.get_input_embeddings()(ids)).logits, whole.logits)
    loss, logits = model(ids, labels=ids, use_cache=False, return_dict=False)
    want = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(loss, want)
    positions = torch.arange(9).expand(2, -1)
    torch.testing.assert_close(model(ids, position_ids=positions).logits, whole.logits)
    assert (model(ids, position_ids=positions + 7).logits - whole.logits).abs().max() < 1e-4  # only differences matter
    last = model.model(ids, output_hidden_states=True)
    torch.testing.assert_close(last.last_hidden_state, last.hidden_states[-1])
    torch.testing.assert_close(model.lm_head(last.last_hidden_state), whole.logits)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({}, "either input_ids or inputs_embeds"),
        ({"input_ids": [[1, 2]], "attention_mask": [[1, 1, 1]]}, r"attention_mask is \(1, 3\), expected \(1, 2\)"),
        ({"input_ids": [[1, 2]], "attention_mask": [[[[1, 1], [1, 1]]]]}, r"attention_mask is \(1, 1, 2, 2\)"),
        ({"input_ids": [[1, 2, 3]], "position_ids": [[0, 1, 0]]}, "packed into one row are not told apart"),
        ({"input_ids": [[1]], "past_key_values": ()}, "the cache is a tuple; give a HybridCache"),
        ({"input_ids": [[1]], "output_attentions": True}, "output_attentions: attention weights are never formed"),
    ],
)
def test_what_cannot_be_done_is_said(model, arguments, message):
    tensors = {name: torch.tensor(x) if isinstance(x, list) else x for name, x in arguments.items()}
    with pytest.raises(ValueError, match=message):
        model(**tensors)


def test_gradient_checkpointing_and_autocast(model):
    ids = ids_of(9, 2, 40)
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[0, :9] = 0

    def gradients():
        model.zero_grad()
        loss = model(ids, attention_mask=mask, labels=ids).loss
        loss.backward()
        return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}

    model.train()
    loss, plain = gradients()
    model._set_gradient_checkpointing(True, lambda *a: torch.utils.checkpoint.checkpoint(*a, use_reentrant=False))
    try:
        assert any(
            module.gradient_checkpointing for module in model.modules() if hasattr(module, "gradient_checkpointing")
        )
        loss_again, again = gradients()
    finally:
        model._set_gradient_checkpointing(False)
    torch.testing.assert_close(loss_again, loss)
    torch.testing.assert_close(again, plain)
    with torch.autocast("cpu", torch.bfloat16):
        rounded_loss, rounded = gradients()
    assert abs(rounded_loss - loss) < 0.02
    a, b = (torch.cat([x.flatten() for x in each.values()]) for each in (plain, rounded))
    assert (a - b).norm() < 0.3 * a.norm()  # bf16 through twelve sublayers of random weights


def test_autocast_rounds_nothing_in_the_recurrences():
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 20, 2, 8, generator=draw) for _ in range(3))
    gates = -torch.rand(1, 20, 2, 8, generator=draw)
    beta, heads = torch.rand(1, 20, 2, generator=draw), torch.rand(2, generator=draw)

    def computed():
        return [
            *recurrences_hybrid.delta_rule(q, k, v, gates, beta, None),
            *recurrences_hybrid.delta_rule(q, k, v, gates[..., :1], beta, None),
            *recurrences_hybrid.ssd(v, beta, -heads, k, q, heads, None),
        ]

    want = computed()
    with torch.autocast("cpu", torch.bfloat16):
        got = computed()
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


def test_flash_linear_attentions_kernels_get_their_arguments(model, monkeypatch):
    """On a GPU in bf16 the delta rules are calls of that package: here of a stand-in with its signatures, which
    computes token by token what they document."""
    called = []

    def kernel(name, q, k, v, g, beta, *, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel):
        called.append(name)
        assert output_final_state and use_qk_l2norm_in_kernel and q.shape == k.shape and q.shape[:3] == v.shape[:3]
        assert g.shape == (q.shape if name == "chunk_kda" else q.shape[:3]) and beta.shape == q.shape[:3]
        assert g.dtype == beta.dtype == torch.float32 and all(x.is_contiguous() for x in (q, k, v, g, beta))
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        state = torch.zeros(*v.shape[:1], *v.shape[2:3], q.shape[-1], v.shape[-1])
        state = state if initial_state is None else initial_state
        outputs = []
        for t in range(q.shape[1]):
            decay = g[:, t] if name == "chunk_kda" else g[:, t, :, None]
            state = decay.exp()[..., None] * state
            error = v[:, t] - (k[:, t, :, :, None] * state).sum(-2)
            state = state + k[:, t, :, :, None] * (beta[:, t, :, None] * error)[..., None, :]
            outputs.append(scale * (q[:, t, :, :, None] * state).sum(-2))
        return torch.stack(outputs, dim=1), state

    def imported(module):
        function = {"fla.ops.gated_delta_rule": "chunk_gated_delta_rule", "fla.ops.kda": "chunk_kda"}[module]
        return SimpleNamespace(**{function: lambda *a, **k: kernel(function, *a, **k)})

    rows = [ids_of(i, n) for i, n in enumerate((21, 9))]
    ids, mask, columns = placed(rows, 21, "left")
    with torch.no_grad():
        want, _ = logits_of(model, ids, (0, 12, 21), mask)
    recurrences_hybrid._fla_kernel.cache_clear()
    monkeypatch.setattr(recurrences_hybrid, "_suits_fla", lambda q: True)
    monkeypatch.setattr(recurrences_hybrid.importlib, "import_module", imported)
    try:
        with torch.no_grad():
            got, _ = logits_of(model, ids, (0, 12, 21), mask)
    finally:
        recurrences_hybrid._fla_kernel.cache_clear()
    assert called == ["chunk_gated_delta_rule", "chunk_gated_delta_rule", "chunk_kda"] * 2
    for i, column in enumerate(columns):
        torch.testing.assert_close(got[i, column], want[i, column], atol=1e-4, rtol=0)


def test_without_a_working_fla_plain_pytorch_runs(monkeypatch):
    q = torch.zeros(1, 2, 1, 8, dtype=torch.bfloat16)
    assert not recurrences_hybrid._suits_fla(q)  # not on a GPU
    monkeypatch.setattr(recurrences_hybrid, "_suits_fla", lambda q: True)
    arguments = (q, q, q, torch.zeros(1, 2, 1, 1), torch.zeros(1, 2, 1), None)

    def absent(module):
        raise ModuleNotFoundError("No module named 'fla'", name="fla")

    def broken(module):
        raise RuntimeError("0 active drivers")

    for importer, warns in ((absent, False), (broken, True)):
        recurrences_hybrid._fla_kernel.cache_clear()
        monkeypatch.setattr(recurrences_hybrid.importlib, "import_module", importer)
        if warns:
            with pytest.warns(UserWarning, match="installed but not used: fla.ops.gated_delta_rule: 0 active drivers"):
                o, _ = recurrences_hybrid.delta_rule(*arguments)
        else:
            o, _ = recurrences_hybrid.delta_rule(*arguments)
        assert o.shape == q.shape and o.dtype == q.dtype
    recurrences_hybrid._fla_kernel.cache_clear()


@pytest.mark.parametrize("tied", [True, False])
def test_weights_survive_saving_and_bf16(tied, tmp_path):
    cfg = model_config(DEMO, tie_word_embeddings=tied)
    torch.manual_seed(0)
    model = torch_model(cfg)
    model.save_pretrained(tmp_path)
    again = HybridForCausalLM.from_pretrained(tmp_path)
    assert (again.lm_head.weight is again.model.embed_tokens.weight) == tied
    for (name, a), (_, b) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(a, b) and a.isfinite().all() and a.std() >= 0, name
    small = HybridForCausalLM.from_pretrained(tmp_path, torch_dtype=torch.bfloat16)
    exact = {name: p for name, p in small.named_parameters() if p.dtype == torch.float32}
    assert {name.split(".")[-1] for name in exact} == {"A_log", "dt_bias", "D"}
    assert all(p.dtype == torch.bfloat16 for name, p in small.named_parameters() if name not in exact)
    ids = ids_of(1, 2, LONG)
    with torch.no_grad():
        got, want = small(ids).logits, model(ids).logits
        assert got.dtype == torch.bfloat16 and got.isfinite().all()
        assert (got - want).std() < 0.1 * want.std()
        ids = small.generate(ids[:, :9], max_new_tokens=4, do_sample=False, eos_token_id=None)
    assert ids.shape == (2, 13)


def test_a_new_model_starts_as_ours_does():
    """Spread and bounds of each kind of parameter, as hybrid_jax/layers draws them."""
    cfg = model_config("KGS-*", rescale_out_proj=True, kda=with_(KDA, lower_bound=-5.0), hidden_size=64)
    torch.manual_seed(0)
    rank = cfg.kda.v_head_dim
    for name, p in torch_model(cfg).named_parameters():
        p = p.detach()
        *_, module, last = name.split(".")
        uniform = None
        if "norm" in module or last == "D":
            assert torch.equal(p, torch.ones_like(p)), name
        elif last == "A_log":
            assert torch.equal(p, torch.zeros_like(p)) if ".0." in name else (0 <= p.min() < p.max() <= math.log(16))
        elif last == "dt_bias":
            steps = torch.nn.functional.softplus(p)
            assert 0.00099 < steps.min() < steps.max() < 0.101, name
        elif "conv1d" in module:
            uniform = 4**-0.5
        elif module in ("f_b_proj", "g_b_proj"):
            uniform = rank**-0.5
        else:
            std = 0.02 * (10**-0.5 if module in ("o_proj", "out_proj", "down_proj") else 1.0)
            assert abs(p.std() / std - 1) < 0.2 and abs(p.mean()) < 0.2 * std, name
        if uniform is not None:
            assert -uniform <= p.min() < -0.8 * uniform and 0.8 * uniform < p.max() <= uniform, name
