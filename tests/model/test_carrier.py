"""What stands for a mixer's cache, and how mixers are found by what they ask of it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tawpipe.model.mixers.carrier import Carrier, cache_argument
from tawpipe.model.mixers.find_mixers import Mixing, mixing_of
from tawpipe.model.stubs import LayerCall


class Sums(nn.Module):
    """Adds up tokens, from a state on."""

    def forward(self, hidden_states: Tensor, cache_params=None) -> Tensor:
        before = None if cache_params is None else cache_params.get_recurrent_state(0)
        sums = hidden_states.cumsum(1) + (0 if before is None else before)
        if cache_params is not None:
            cache_params.update_recurrent_state(sums[:, -1:], 0)
        return sums


class NewSums(Sums):
    """As transformers names it from 5.24 on."""

    def forward(self, hidden_states: Tensor, cache=None) -> Tensor:
        return super().forward(hidden_states, cache_params=cache)


class Layer(nn.Module):
    """A mixer and something that has none."""

    def __init__(self) -> None:
        super().__init__()
        self.mixer, self.mlp = Sums(), nn.Linear(4, 4)

    def forward(self, hidden_states: Tensor, past_key_values=None) -> Tensor:
        return self.mlp(self.mixer(hidden_states, cache_params=past_key_values))


def test_cache_argument_is_found_under_its_known_names():
    assert (
        cache_argument(NewSums()) == "cache"
        and cache_argument(Sums()) == "cache_params"
        and cache_argument(Layer()) == "past_key_values"
    )
    assert cache_argument(nn.Linear(1, 1)) is None


def test_conv_state_of_two_halves_equals_the_whole():
    """What a convolution sees before a chunk is the end of the chunk before it, zeros before the first."""
    whole = torch.randn(2, 3, 7)
    first = Carrier()
    assert first.update_conv_state(whole[..., :2], 0, conv_kernel_size=4) is not None and not first.has_previous_state()
    second = Carrier(first.after)
    seen = second.update_conv_state(whole[..., 2:], 0, conv_kernel_size=4)
    assert torch.equal(seen[..., 1:], whole) and not seen[..., 0].any() and second.has_previous_state()
    assert torch.equal(second.after["conv", 0], whole[..., -3:])


def test_recurrent_state_is_kept_in_fp32_with_its_graph():
    carrier, state = Carrier(), torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    carrier.update_recurrent_state(state, 0)
    assert carrier.after["recurrent", 0].dtype == torch.float32 and carrier.after["recurrent", 0].requires_grad


def test_layer_that_updates_a_cache_state_is_found_as_a_mixer():
    found = mixing_of(Layer(), LayerCall((), {}), torch.randn(1, 5, 4, requires_grad=True))
    assert isinstance(found, Mixing) and found.mixers == ("mixer",) and not found.attention and not found.unknown


class OldSums(Sums):
    """As mixers were before transformers 5.21."""

    def forward(self, hidden_states: Tensor, cache_params=None) -> Tensor:
        sums = hidden_states.cumsum(1)
        if cache_params is not None and cache_params.has_previous_state(3):
            sums = sums + cache_params.layers[3].recurrent_states[0]
        if cache_params is not None:
            cache_params.update_recurrent_state(sums[:, -1:], 3)
        return sums


def test_mixer_may_read_the_layers_of_its_cache():
    whole, mixer, first = torch.randn(1, 5, 4), OldSums(), Carrier()
    parts = [mixer(whole[:, :2], first), mixer(whole[:, 2:], Carrier(first.after))]
    torch.testing.assert_close(torch.cat(parts, dim=1), mixer(whole))
    layer = Layer()
    layer.mixer = mixer
    assert mixing_of(layer, LayerCall((), {}), whole.requires_grad_()).mixers == ("mixer",)
