"""Metrics: one row a step whatever happens in between, FLOPs by the formula, and a console that only rank 0 has."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tawpipe.console import Console, duration
from tawpipe.model.flops import mfu, peak_flops, training_flops
from tawpipe.train.saying.metrics import MetricsWriter, peak_memory_bytes

ROW = {"loss": 2.5, "grad_norm": 1.0, "learning_rate": 1e-3, "tokens_per_second": 100.0}


def rows(output: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def write(output: Path, steps: range, *, resumed_step: int = 0, loss: float = 2.5) -> None:
    with MetricsWriter(output, resumed_step=resumed_step) as writer:
        for step in steps:
            writer.write(step, {**ROW, "loss": loss})


def test_metrics_row_is_written_to_disk_immediately(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "new")
    writer.write(1, {**ROW, "validation_loss": 3.0, "mfu": None})
    assert rows(tmp_path / "new") == [{"step": 1, **ROW, "validation_loss": 3.0, "mfu": None}]
    writer.close()


@pytest.mark.parametrize(("resumed_step", "begin", "kept"), [(0, 0, 0), (3, 4, 4), (6, 7, 7), (9, 10, 7)])
def test_no_step_is_in_the_metrics_file_twice_after_a_resume(
    tmp_path: Path, resumed_step: int, begin: int, kept: int
) -> None:
    write(tmp_path, range(7))  # with what is measured before the first step, which a new start measures again
    write(tmp_path, range(begin, 12), resumed_step=resumed_step, loss=1.0)
    found = rows(tmp_path)
    assert [row["step"] for row in found] == [*range(kept), *range(begin, 12)]
    assert [row["loss"] for row in found] == [2.5] * kept + [1.0] * (12 - begin)


def test_truncated_metrics_row_is_removed(tmp_path: Path) -> None:
    write(tmp_path, range(1, 4))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    write(tmp_path, range(4, 6), resumed_step=3)
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4, 5]
    assert list(tmp_path.iterdir()) == [tmp_path / "metrics.jsonl"]


def test_metrics_steps_must_increase_and_rows_be_complete(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write(2, ROW)
        with pytest.raises(AssertionError, match="step 2 after those of step 2"):
            writer.write(2, ROW)
        with pytest.raises(AssertionError, match="lack"):
            writer.write(3, {"loss": 1.0})


def test_every_metrics_row_is_strict_json(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        curve = {"256": 3.5, "512": float("nan"), "1024": None}
        values = {**ROW, "loss": float("nan"), "grad_norm": float("inf"), "validation_by_position": curve}
        writer.write(1, values)
    row = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=pytest.fail)
    assert row["loss"] is None and row["grad_norm"] is None
    assert row["validation_by_position"] == {"256": 3.5, "512": None, "1024": None}


@pytest.mark.parametrize(
    ("device", "dtype", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312e12),
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.4e12),
        ("NVIDIA H100 PCIe", "bfloat16", 756e12),
        ("NVIDIA H200", "bfloat16", 989.4e12),
        ("NVIDIA B200", "bfloat16", 2.25e15),
        ("NVIDIA L40S", "bfloat16", 362.05e12),
        ("NVIDIA L4", "bfloat16", 121e12),
        ("NVIDIA GeForce RTX 4090", "bfloat16", 165.2e12),
        ("NVIDIA GeForce RTX 4060", "bfloat16", None),
        ("NVIDIA H100 80GB HBM3", "float32", None),
        ("cpu", "bfloat16", None),
    ],
)
def test_peak_flops_are_known_or_none(device: str, dtype: str, peak: float | None) -> None:
    assert peak_flops(device, dtype) == peak


def test_flops_count_token_pairs_only_inside_documents() -> None:
    def flops(lengths: list[int], window: int | None = None) -> float:
        return training_flops(matmul_parameters=10, num_layers=2, attention_width=4, lengths=lengths, window=window)

    assert flops([8]) == 6 * 10 * 8 + 12 * 2 * 4 * 8 * 8 / 2
    assert flops([4, 4]) - flops([8]) == -12 * 2 * 4 * (8 * 8 - 2 * 4 * 4) / 2
    assert flops([8], window=8) == flops([8]) > flops([8], window=2)
    assert flops([2], window=4) == flops([2])


def test_mfu_is_a_share_of_all_devices_or_none() -> None:
    assert mfu(50.0, 2.0, peak=10.0, num_devices=5) == 0.5
    assert mfu(50.0, 2.0, peak=None, num_devices=5) is None


def test_peak_memory_of_the_process_never_decreases() -> None:
    before = peak_memory_bytes("cpu")
    held = bytearray(64 << 20)
    held[:: 1 << 12] = b"x" * len(held[:: 1 << 12])
    most = peak_memory_bytes("cpu")
    del held
    assert most >= 0.99 * before and most > 64 << 20
    assert peak_memory_bytes("cpu") >= 0.99 * most  # the kernel counts pages in batches


def test_console_of_rank_0_prints_plain_lines_without_a_terminal() -> None:
    now = iter([0.0, 30.0])
    stream = io.StringIO()
    console = Console(stream=stream, clock=lambda: next(now))
    console.topology("4 processes = 2 nodes x 2")
    console.plan([("weights [bf16]", "1 GiB"), ("links", "2 GiB/s")])
    for step in (10, 20):
        console.progress(step, 150, loss=3.25, grad_norm=0.5, tokens_per_second=12345.6)
    assert stream.getvalue().splitlines() == [
        "4 processes = 2 nodes x 2",
        "plan:",
        "  weights [bf16]  1 GiB",
        "  links           2 GiB/s",
        "step  10/150 | loss 3.2500 | grad norm 0.5 | 12,346 tokens/s",
        "step  20/150 | loss 3.2500 | grad norm 0.5 | 12,346 tokens/s | 6 min 30 s left",
    ]


def test_consoles_of_other_ranks_print_nothing() -> None:
    stream = io.StringIO()
    console = Console(1, stream=stream)
    console.topology("x")
    console.plan([("a", "b")])
    console.progress(1, 2, loss=1.0, grad_norm=1.0, tokens_per_second=1.0)
    console.notice("x")
    console.summary([("a", "b")])
    assert stream.getvalue() == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize("colours", ["", "1"])
def test_console_lines_to_a_full_disk_are_dropped(monkeypatch: pytest.MonkeyPatch, colours: str) -> None:
    monkeypatch.setenv("FORCE_COLOR", colours)
    full = open("/dev/full", "w")  # noqa: PTH123, SIM115
    console = Console(stream=full)
    console.plan([("a", "b")])
    console.notice("x")
    console.progress(1, 2, loss=1.0, grad_norm=1.0, tokens_per_second=1.0)
    with pytest.raises(OSError, match="No space"):
        full.close()


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59.6, "1 min 00 s"), (75, "1 min 15 s"), (3725, "1 h 02 min")]
)
def test_durations_are_spelled_in_seconds_minutes_and_hours(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_metrics_row_that_a_full_disk_refuses_is_skipped(tmp_path):
    code = "import resource, signal, sys; from pathlib import Path\n"
    code += "from tawpipe.train.saying.metrics import MetricsWriter\n"
    code += "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    code += "writer = MetricsWriter(Path(sys.argv[1]))\n"
    code += "row = dict(loss=1.0, grad_norm=1.0, learning_rate=1.0, tokens_per_second=1.0)\n"
    code += "assert not writer.write(1, row)\n"
    code += "resource.setrlimit(resource.RLIMIT_FSIZE, (150, resource.RLIM_INFINITY))\n"
    code += "said = [writer.write(step, row) for step in (2, 3)]\n"
    code += "assert 'No space left' in said[0] and not said[1], said\n"
    code += "resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))\n"
    code += "assert not writer.write(4, row)\n"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=60)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 4]
