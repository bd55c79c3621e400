"""The time of a document that a model itself tells: what its layers see, and what they multiply."""

from __future__ import annotations

import pytest
from transformers import AutoModelForCausalLM, PreTrainedConfig

from family_configs import tiny_config
from tawpipe.model.chain import Chain
from tawpipe.model.flops import active_elements, chain_flops, training_flops, windows, work_of
from tawpipe.schedule.pipelines.times import times_from_sizes


def chain_of(config: PreTrainedConfig) -> Chain:
    return Chain(AutoModelForCausalLM.from_config(config))


def test_document_work_counts_matrices_and_token_pairs() -> None:
    config = tiny_config("llama")
    chain = chain_of(config)
    work, width = work_of(chain), config.num_attention_heads * config.head_dim
    slots = [[slot for unit in block.units for slot in chain.units[unit].slots] for block in chain.blocks]
    matrices = [sum(slot.numel for slot in own if len(slot.shape) > 1) for own in slots]
    layers = 2 * sum(matrices[1:-1])
    for length in (1, 17, 4000):
        expected = (4 * layers + 3 * 2 * matrices[-1]) * length + 4.5 * len(chain.layers) * 2 * width * length**2
        assert work.of(length) == pytest.approx(expected)


def test_windowed_layers_count_pairs_within_their_window() -> None:
    config = tiny_config("gemma2")
    seen = windows(config)
    assert {one is None for one in seen} == {True, False} and len(seen) == config.num_hidden_layers
    kinds = {kind.window: kind for kind in work_of(chain_of(config)).kinds if kind.per_pair}
    assert set(kinds) == set(seen)
    for window, kind in kinds.items():
        for length in (3, 500):
            flops = training_flops(
                matmul_parameters=0, num_layers=1, attention_width=1, lengths=[length], window=window
            )
            assert (kind.of(length) - kind.per_token * length) / kind.per_pair == pytest.approx(flops / 6)


def test_mixture_of_experts_counts_the_active_experts_of_a_token() -> None:
    config = tiny_config("mixtral")
    config.num_experts_per_tok = 1
    one = work_of(chain_of(config)).of(10)
    config.num_experts_per_tok = 2
    two = work_of(chain_of(config)).of(10)
    experts = sum(slot.numel for unit in chain_of(config).units for slot in unit.slots if ".experts." in slot.name)
    assert experts and two - one == pytest.approx(4 * 2 * experts / config.num_local_experts * 10)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_unplanned_pipeline_stages_are_cut_by_active_experts(family: str) -> None:
    config = tiny_config(family)
    config.num_experts_per_tok = 1
    chain = chain_of(config)
    met = [active_elements(chain, block) for block in range(len(chain.blocks))]
    whole = [sum(chain.units[unit].numel for unit in block.units) for block in chain.blocks]
    assert any(some < all_of_it for some, all_of_it in zip(met, whole, strict=True))
    layers = times_from_sizes(chain.spec).blocks[1:-1]
    for block, times in enumerate(layers, 1):
        assert times.forward == -(-1000 * round(met[block]) // max(map(round, met[1:])))
        assert (times.backward_input, times.backward_weight) == (2 * times.forward, times.forward)
    assert [unit.numel for unit in chain.spec.units] == [unit.numel for unit in chain.units]


def test_frozen_weights_count_fewer_matrix_products() -> None:
    """Two instead of three where a gradient passes by, one where none does; and one less in a step's time."""
    model = AutoModelForCausalLM.from_config(tiny_config("llama"))
    free = Chain(model)
    of_layers = range(1, len(free.layers) + 1)
    layers = [sum(one.numel for one in free.units if one.blocks == (block,)) for block in of_layers]
    work, flops = work_of(free), chain_flops(free, [1])
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "layers.1." not in name
    middle = Chain(model)
    assert flops and chain_flops(middle, [1]) == pytest.approx(flops - 2 * layers[1])
    matrices = sum(p.numel() for n, p in model.named_parameters() if "layers.1." in n and p.ndim > 1)
    assert work.of(1) - work_of(middle).of(1) == pytest.approx(2 * matrices)
    for parameter in model.model.parameters():
        parameter.requires_grad = False
    head = sum(one.numel for one in middle.units if len(free.layers) + 1 in one.blocks and one.blocks != (0,))
    norm = model.model.norm.weight.numel()
    width = free.config.num_attention_heads * free.config.head_dim
    alone = 2 * sum(layers) + 4 * len(layers) * width / 2 + 6 * (head - norm) + 4 * norm
    assert chain_flops(Chain(model), [1]) == pytest.approx(alone)
