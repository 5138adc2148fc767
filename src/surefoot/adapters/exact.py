"""A `transformers` model whose rows do not depend on how many tokens are read at once.

Plain decoding reads one token a pass, verification several. A library model gives a token other bits in the two,
because matrix products and attention choose their algorithm, and so their order of summation, by size; in bfloat16 that
is enough to change the output. `exact_copy` makes a copy of a model (sharing its weights) in which

- every linear layer is one of `kernels.linear`, whose rows agree at every count from two on;
- attention treats a window's queries as a batch: each is scored against whole blocks of the cache that hold its prefix,
  a size that its own position decides, so plain decoding makes the very same computation there;
- the cache is allocated in whole blocks, so that they are views.

What else a model does with several rows is unknown, so whether a copy is exact is measured before it is used
(`TransformersTarget`), not assumed.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F  # its usual name
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache
from transformers.pytorch_utils import Conv1D

from surefoot.errors import InputError
from surefoot.kernels.linear import LinearFactory

ATTENTION = "surefoot_exact"
BLOCK = 64  # attended lengths are whole blocks of this many cache entries
QUERY_ROWS = (
    8  # PyTorch's CPU attention gives each thread scratch memory of (rows * (length + dim + 2)) floats, one after
)
# another, and its matrix products round differently off 64-byte boundaries: whole multiples keep all threads on them
UNSUPPORTED = ("softcap", "s_aux", "position_bias", "head_mask")


@dataclass
class Pass:
    """What attention must know about the pass it is in: how many tokens the cache held before it, and whether it reads
    a window (queries apart) or a prefill chunk (queries together). `reach` is how many tokens a layer's query sees, by
    layer: all (None) or the last so many, itself included. Masks are shared by the layers of a pass."""

    reach: list[int | None]
    start: int = 0
    window: bool = False
    masks: dict[tuple[int, int, int | None], Tensor] = field(default_factory=dict)

    def begin(self, start: int, window: bool) -> None:
        """The next forward pass starts."""
        self.start, self.window = start, window
        self.masks.clear()

    def visible(self, first: int, last: int, length: int, reach: int | None, device: torch.device) -> Tensor:
        """Which of `length` keys the queries at positions first .. last - 1 see, [n, length] bool."""
        if (first, length, reach) not in self.masks:
            queries, keys = torch.arange(first, last, device=device)[:, None], torch.arange(length, device=device)
            mask = keys <= queries
            self.masks[first, length, reach] = mask if reach is None else mask & (keys > queries - reach)
        return self.masks[first, length, reach]


def exact_copy(model: PreTrainedModel) -> tuple[PreTrainedModel, Pass]:
    """A copy of the model as the module's docstring says, and the `Pass` to fill in before each of its forward passes.

    Parameters and buffers are shared; on the CPU the linear layers add a packed second copy of their weights. The model
    itself stays as it is. Needs a `fixed_cache`. Raises InputError for layers that are neither full nor sliding-window
    attention.
    """
    reach = attention_reach(model)
    AttentionInterface.register(ATTENTION, _attention)
    shared: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    twin = copy.deepcopy(model, shared).eval()
    current = Pass(reach)
    factory = LinearFactory()
    for module in list(twin.modules()):
        if hasattr(module, "layer_idx"):
            module.surefoot_pass = current  # the one way to reach the attention function: it is handed the module
        for name, child in module.named_children():
            if type(child) in (nn.Linear, Conv1D):
                setattr(module, name, RowLinear(child, factory))
    for module in twin.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation = ATTENTION
    return twin, current


def attention_reach(model: PreTrainedModel) -> list[int | None]:
    """Per layer, the sliding window or None for full attention. Raises InputError for a layer of another kind."""
    config = model.config.get_text_config(decoder=True)
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        raise InputError(f"layer_types: expected full_attention or sliding_attention, found {sorted(kinds)}")
    layers = DynamicCache(config=config).layers
    return [layer.sliding_window if layer.is_sliding else None for layer in layers]


class RowLinear(nn.Module):
    """A linear layer with optional bias whose rows are independent of their number."""

    def __init__(self, linear: Any, factory: LinearFactory) -> None:
        super().__init__()
        weight = linear.weight.detach()
        self._product = factory(weight.t().contiguous() if isinstance(linear, Conv1D) else weight)
        self._bias = None if linear.bias is None else linear.bias.detach().float()
        self.weight = linear.weight  # models look at its dtype and device

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out], in x's dtype."""
        out = self._product(x.reshape(-1, x.shape[-1]))
        if self._bias is not None:
            out = out + self._bias
        return out.to(x.dtype).view(*x.shape[:-1], -1)


class BlockLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers' class has no types: mypy takes it for Any
    """Keys and values of one layer, [1, Hkv, capacity, D]. `update` gives whole blocks: what stands past the last token
    is finite and must be masked."""

    is_sliding = False
    is_croppable = True

    def __init__(self) -> None:
        super().__init__()
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Start with no capacity in the tensors' dtype and on their device."""
        self.keys = key_states[:, :, :0]
        self.values = value_states[:, :, :0]
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append [1, Hkv, n, D] each; returns keys and values [1, Hkv, L, D], L a multiple of the block."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.length + key_states.shape[2]
        if end > self.keys.shape[2]:
            capacity = whole_blocks(max(end, 2 * self.length))
            self.keys = F.pad(self.keys[:, :, : self.length], (0, 0, 0, capacity - self.length))
            self.values = F.pad(self.values[:, :, : self.length], (0, 0, 0, capacity - self.length))
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        self.length = end
        return self.keys[:, :, : whole_blocks(end)], self.values[:, :, : whole_blocks(end)]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Total length and offset, as `transformers` asks for them."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens held."""
        return self.length

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens (a negative number or 0, as everywhere in `transformers`)."""
        self.length += tokens_to_remove


def fixed_cache(layers: int) -> Cache:
    """An empty cache for a copy with `layers` attention layers."""
    return Cache(layers=[BlockLayer() for _ in range(layers)])


def whole_blocks(length: int) -> int:
    """`length` rounded up to whole blocks."""
    return -(-length // BLOCK) * BLOCK


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function `transformers` calls: query [1, H, n, D], key and value [1, Hkv, L, D] -> [1, n, H, D]."""
    for name in UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise InputError(f"attention argument {name}: expected none in the exact copy, found {kwargs[name]!r}")
    current: Any = module.surefoot_pass
    reach: int | None = current.reach[module.layer_idx]
    if current.window:
        return _attend_window(query, key, value, current, reach, scaling), None
    end = current.start + query.shape[2]
    mask = current.visible(current.start, end, end, reach, query.device)
    out = F.scaled_dot_product_attention(
        query, key[:, :, :end], value[:, :, :end], attn_mask=mask, scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2), None


def _attend_window(
    query: Tensor, key: Tensor, value: Tensor, current: Pass, reach: int | None, scaling: float | None
) -> Tensor:
    """Query i attends to the keys up to its own, as one element of a batch. The query heads of one key head are
    the rows of its query block: [n, Hkv, H / Hkv (padded), D]."""
    start = current.start
    count, heads, kv_heads = query.shape[2], query.shape[1], key.shape[1]
    group = heads // kv_heads
    rows = query[0].transpose(0, 1).reshape(count, kv_heads, group, -1)
    rows = F.pad(rows, (0, 0, 0, -group % QUERY_ROWS))
    parts = []
    first = 0
    while first < count:  # once per block that some query's prefix ends in
        length = whole_blocks(start + first + 1)
        last = min(count, length - start)
        parts.append(
            F.scaled_dot_product_attention(
                rows[first:last],
                key[:, :, :length].expand(last - first, -1, -1, -1),
                value[:, :, :length].expand(last - first, -1, -1, -1),
                attn_mask=current.visible(start + first, start + last, length, reach, query.device)[
                    :, None, None
                ],  # [n, 1, 1, L]
                scale=scaling,
            )
        )
        first = last
    out = torch.cat(parts) if len(parts) > 1 else parts[0]
    return out[:, :, :group].reshape(1, count, heads, -1)
