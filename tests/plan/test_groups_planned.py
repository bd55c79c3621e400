"""Groups of three sizes in plans: looked at where they may gain, and named where they do."""

from __future__ import annotations

import pytest

from plan_requests import FEW, looking_at, plan_request
from tawpipe.cli import main
from tawpipe.plan.search.candidate import Outlook
from tawpipe.plan.search.search import _behind
from tawpipe.schedule.strategies.groups import Grouped


def test_groups_strategy_is_evaluated_only_where_it_may_win():
    request = plan_request()
    way = Grouped("1n/1n/1n")
    assert "needs more memory" in _behind(request, way, Outlook())
    assert _behind(request, way, Outlook(best_s=1e9)) == ""
    assert "computing and links alone take" in _behind(request, way, Outlook(best_s=1e-9))


@pytest.mark.slow
def test_groups_of_two_nodes_win_in_a_plan_with_half_size_gradients(capsys):
    words = "--model llama-8b --topology 4x8@40gbit --device-name H100 --memory 76 --sequence-length 32768"
    with looking_at(*FEW, "tawpipe-whole", "tawpipe-groups", "weipipe", "interleaved-1f1b"):
        assert main(["plan", *words.split(), "--global-batch", "32", "--schedule.reduce-dtype", "same"]) == 0
    said = capsys.readouterr().out
    seconds = {
        line.split()[0]: float(line.split()[1])
        for line in said.splitlines()
        if " MFU" not in line and " s " in line[:30]
    }
    assert min(seconds, key=lambda name: seconds[name]) == "tawpipe-groups"
    assert min(seconds["hsdp"], seconds["tawpipe-step"]) > 1.05 * seconds["tawpipe-groups"]
