"""A hybrid language model in PyTorch: embedding, the sublayers that `layout` names, final norm, head.

Padding changes nothing, wherever it stands: the tokens of each row are moved to its front before the first sublayer and
back after the last one, and behind them neither recurrences nor attention take anything in.

Shapes: B batch, T time, S time with what the cache holds, D model.
"""

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from .configuration_hybrid import HybridConfig
from .mixers_hybrid import (
    MIXERS,
    HybridGDN,
    HybridKDA,
    HybridLinear,
    HybridMamba2,
    HybridRMSNorm,
    HybridShortConv,
    HybridSwiGLU,
    Pass,
    cos_sin,
)
from .recurrences_hybrid import CHUNK  # noqa: F401  transformers 4 copies only files that this one imports by itself

# Versions of transformers differ in what they call the cache.
_CACHE = next(f.name for f in dataclasses.fields(CausalLMOutputWithPast) if f.name in ("cache", "past_key_values"))


class HybridCache:
    """What the sublayers keep of earlier tokens: recurrent states, the ends of convolutions, MLA's latents, GQA's keys
    and values. `states` has a dict of tensors [B, ...] a sublayer, None before the first token.

    `length` counts the tokens taken in, padding too; `real` [B, length] bool tells them apart (None: no padding).
    """

    is_compileable = False
    is_croppable = False

    def __init__(self, config: HybridConfig):
        self.reset(config.num_hidden_layers)

    def reset(self, sublayers: int | None = None) -> None:
        self.states: list = [None] * (len(self.states) if sublayers is None else sublayers)
        self.real: Tensor | None = None
        self.length = 0

    def __len__(self) -> int:
        return len(self.states)

    # One entry, as not every kind of state is linear attention's: `generate` then counts tokens by get_seq_length.
    is_linear = (False,)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1  # there is none

    get_max_cache_shape = get_max_length

    def counts(self) -> Tensor | int:
        """Tokens without padding, [B] or one number for all rows."""
        return self.length if self.real is None else self.real.sum(1)

    def append(self, real: Tensor | None, batch: int, length: int, device) -> None:
        """Counts `length` more tokens of each row, `real` [B, length] of them without padding (None: all)."""
        if real is not None or self.real is not None:
            everything = torch.ones(1, 1, dtype=torch.bool, device=device)
            old = everything.expand(batch, self.length) if self.real is None else self.real
            self.real = torch.cat([old, everything.expand(batch, length) if real is None else real], dim=1)
        self.length += length

    def batch_select_indices(self, indices: Tensor) -> None:
        """Row i becomes what row indices[i] was."""
        pick = lambda x: x.index_select(0, indices.to(x.device))  # noqa: E731
        self.states = [state and {name: pick(x) for name, x in state.items()} for state in self.states]
        self.real = self.real if self.real is None else pick(self.real)

    reorder_cache = batch_select_indices

    def batch_repeat_interleave(self, repeats: int) -> None:
        held = next((x for state in self.states if state for x in state.values()), None)
        if held is not None:
            self.batch_select_indices(torch.arange(len(held), device=held.device).repeat_interleave(repeats))

    def crop(self, *args, **kwargs) -> None:
        raise NotImplementedError("a recurrent state cannot be taken back to earlier tokens")


class HybridLayer(nn.Module):
    """x + child(norm(x)); the child is called mlp for `-`, else mixer."""

    def __init__(self, config: HybridConfig, symbol: str):
        super().__init__()
        if symbol != "S" or config.mamba2["pre_norm"]:
            self.norm: nn.Module = HybridRMSNorm(config.hidden_size, config.norm_eps)
        else:
            self.norm = nn.Identity()
        if symbol == "-":
            self.mlp = HybridSwiGLU(config)
        else:
            self.mixer = MIXERS[symbol](config)

    def forward(self, x: Tensor, this: Pass, state: dict | None):
        if hasattr(self, "mlp"):
            return x + self.mlp(self.norm(x)), {}
        y, new = self.mixer(self.norm(x), this, state)
        return x + y, new if this.keep_state else {}


class HybridPreTrainedModel(PreTrainedModel):
    config: HybridConfig
    config_class = HybridConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["HybridLayer"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values", "cache"]  # noqa: RUF012
    _keep_in_fp32_modules_strict = ["A_log", "dt_bias", "D"]  # noqa: RUF012
    _supports_sdpa = True
    _is_stateful = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """As hybrid_jax draws them."""
        std = self.config.initializer_range

        def draw(param: Tensor | None, fill) -> None:
            if param is not None and not getattr(param, "_is_hf_initialized", False):
                fill(param)

        def uniform(bound: float):
            return lambda p: p.uniform_(-bound, bound)

        if isinstance(module, HybridLinear):
            if module.last and self.config.rescale_out_proj:
                std *= (2 * self.config.num_hidden_layers) ** -0.5
            draw(module.weight, uniform(module.bound) if module.bound else lambda p: p.normal_(0.0, std))
            draw(module.bias, uniform(module.bound))
        elif isinstance(module, nn.Embedding):
            draw(module.weight, lambda p: p.normal_(0.0, std))
        elif isinstance(module, HybridRMSNorm):
            draw(module.weight, lambda p: p.fill_(1.0))
        elif isinstance(module, HybridShortConv):
            for param in (module.weight, module.bias):
                draw(param, uniform(module.weight.shape[-1] ** -0.5))
        elif isinstance(module, HybridGDN | HybridKDA | HybridMamba2):
            bounded = getattr(module.sizes, "lower_bound", 0.0) != 0.0
            draw(module.A_log, lambda p: p.zero_() if bounded else p.copy_(torch.empty_like(p).uniform_(1, 16).log()))
            draw(module.dt_bias, _dt_bias)
            draw(getattr(module, "D", None), lambda p: p.fill_(1.0))


def _dt_bias(param: Tensor) -> None:
    """softplus(param) log-uniform in [0.001, 0.1]."""
    low, high = math.log(0.001), math.log(0.1)
    dt = torch.empty_like(param, dtype=torch.float32).uniform_(low, high).exp()
    param.copy_(dt + torch.log(-torch.expm1(-dt)))


class HybridModel(HybridPreTrainedModel):
    """Embedding, sublayers and final norm."""

    def __init__(self, config: HybridConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(HybridLayer(config, symbol) for symbol in config.layout)
        self.norm = HybridRMSNorm(config.hidden_size, config.norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: HybridCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        cache: HybridCache | None = None,
        **kwargs,
    ):
        """input_ids [B, T] or inputs_embeds [B, T, D]; attention_mask [B, T] or, with a cache, [B, S], 0 at padding.

        position_ids [B, T] count up by one a token; None: from 0 at a row's first token. A cache is updated in place.
        hidden_states: the input of each sublayer, then last_hidden_state. Raises ValueError for inputs that do not fit.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        if kwargs.get("output_attentions"):
            raise ValueError("output_attentions: attention weights are never formed here; leave it out")
        cache = past_key_values if cache is None else cache
        if cache is not None and not isinstance(cache, HybridCache):
            raise ValueError(f"the cache is a {type(cache).__name__}; give a HybridCache, or none to have one made")
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if use_cache and cache is None:
            cache = HybridCache(self.config)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states

        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        B, T = x.shape[:2]
        real = _real_tokens(attention_mask, B, T, 0 if cache is None else cache.length)
        order = None if real is None else torch.argsort(~real, dim=1, stable=True)
        x = _move(x, order)
        real = None if real is None else _move(real, order)
        this = self._shared(x, real, order, position_ids, cache, keep_state=cache is not None)

        back = None if order is None else torch.argsort(order, dim=1)
        hidden = []
        for i, layer in enumerate(self.layers):
            if output_hidden_states:
                hidden.append(_move(x, back))
            if self.gradient_checkpointing and self.training and cache is None:
                x, _ = self._gradient_checkpointing_func(layer.__call__, x, this, None)
            else:
                x, state = layer(x, this, None if cache is None else cache.states[i])
                if cache is not None:
                    cache.states[i] = state
        x = _move(self.norm(x), back)
        if cache is not None:
            cache.append(real, B, T, x.device)
        fields: dict[str, Any] = {_CACHE: cache, "hidden_states": (*hidden, x) if output_hidden_states else None}
        output = BaseModelOutputWithPast(last_hidden_state=x, **fields)
        return output if _as_dict(self.config, return_dict) else output.to_tuple()

    def _shared(self, x, real, order, position_ids, cache: HybridCache | None, keep_state: bool) -> Pass:
        """What every sublayer of this pass needs; x [B, T, D] with each row's tokens first, `real` [B, T] likewise."""
        B, T = x.shape[:2]
        past = 0 if cache is None else cache.length
        steps = torch.arange(T, device=x.device)
        if position_ids is None:
            positions = steps + _column(0 if cache is None else cache.counts())
            positions = positions.expand(B, T)
        else:
            positions = _move(position_ids.expand(B, T), order)
            packed = positions[:, 1:] != positions[:, :-1] + 1
            if T > 1 and bool((packed if real is None else packed & real[:, 1:]).any()):
                raise ValueError(
                    "position_ids do not count up by one: documents packed into one row are not told apart"
                )
        config, layout = self.config, self.config.layout
        mla, gqa = config.section("mla"), config.section("gqa")
        mask = None
        seen = None if cache is None else cache.real
        if past and ("*" in layout or "A" in layout) and (T > 1 or seen is not None):
            at = past + steps
            mask = (torch.arange(past + T, device=x.device) <= at[:, None]).expand(B, 1, T, past + T)
            if seen is not None:
                # Of the new ones, padding stands behind and no token sees it; it sees itself, so that no row is empty.
                new = torch.ones(B, T, dtype=torch.bool, device=x.device)
                mask = mask & torch.cat([seen, new], dim=1)[:, None, None]
        return Pass(
            counts=None if real is None else real.sum(1),
            mask=mask,
            rope_mla=cos_sin(mla.rope, mla.qk_rope_head_dim, positions) if "*" in layout else None,
            rope_gqa=cos_sin(gqa.rope, gqa.head_dim, positions) if "A" in layout else None,
            keep_state=keep_state,
        )


def _column(counts: Tensor | int) -> Tensor | int:
    return counts[:, None] if isinstance(counts, Tensor) else counts


def _move(x: Tensor, order: Tensor | None) -> Tensor:
    """x [B, T, ...] with each row's entries in `order` [B, T]."""
    if order is None:
        return x
    return x.gather(1, order.reshape(*order.shape, *(1,) * (x.ndim - 2)).expand_as(x))


def _real_tokens(attention_mask: Tensor | None, batch: int, length: int, past: int) -> Tensor | None:
    """[B, T] bool of the new tokens, None where none is padding. Raises ValueError for a mask of another shape."""
    if attention_mask is None:
        return None
    shape = tuple(attention_mask.shape) if isinstance(attention_mask, Tensor) else type(attention_mask).__name__
    if shape not in ((batch, length), (batch, past + length)):
        raise ValueError(f"attention_mask is {shape}, expected {(batch, past + length)}: 0 at padding, else 1")
    real = attention_mask[:, -length:].bool()
    return None if bool(real.all()) else real


def _as_dict(config: HybridConfig, return_dict: bool | None) -> bool:
    return bool(config.return_dict if return_dict is None else return_dict)


class HybridForCausalLM(HybridPreTrainedModel, GenerationMixin):
    """HybridModel and a head, whose weight is the embedding's with tie_word_embeddings."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: HybridConfig):
        super().__init__(config)
        self.model = HybridModel(config)
        self.lm_head = HybridLinear(config.hidden_size, config.vocab_size)
        self.post_init()

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # the first call of `forward` makes a HybridCache

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: HybridCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cache: HybridCache | None = None,
        output_attentions: bool | None = None,
        **kwargs,
    ):
        """As HybridModel. labels [B, T]: the loss is the mean cross entropy of token t + 1 at t, where it is not -100.
        logits_to_keep: logits of so many last tokens (0: all), or of these indices.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            return_dict=True,
            cache=past_key_values if cache is None else cache,
            output_attentions=output_attentions,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        fields = {_CACHE: getattr(outputs, _CACHE), "hidden_states": outputs.hidden_states}
        output = CausalLMOutputWithPast(loss=loss, logits=logits, **fields)
        return output if _as_dict(self.config, return_dict) else output.to_tuple()
