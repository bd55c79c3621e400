"""What is named while a run goes on: ranks that stay slow, losses that jump."""

from __future__ import annotations

import torch

from tawpipe.train.saying.alarms import Spikes, Stragglers


def test_lasting_straggler_is_named_and_noise_is_not():
    stragglers = Stragglers(1.3)
    assert not any(stragglers.look([1.0, 1.0, 2.0 if step % 3 else 1.0, 1.0]) for step in range(30))
    named = [step for step in range(1, 40) if stragglers.look([1.0, 1.0, 1.0, 2.0]) == [(3, 2.0)]]
    assert named == [4, 8, 16, 32]
    assert not any(Stragglers(0).look([1.0, 9.0]) for _ in range(9))


def test_loss_spike_is_named_and_noise_is_not():
    spikes, generator = Spikes(8.0), torch.Generator().manual_seed(0)
    for i in range(200):
        assert not spikes.look(3 - i / 200 + 0.02 * float(torch.randn((), generator=generator)))
    assert "loss spike: 4.0000" in spikes.look(4.0)
    assert not spikes.look(float("nan"))
    assert not Spikes(0).look(1e9)
