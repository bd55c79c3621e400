"""``tawpipe open``: which pages there are, what is served to whom, and what odd folders and ports come to."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from html_pages import check_page_text, served
from tawpipe.cli import main
from tawpipe.commands import open as command
from tawpipe.commands.open import find_pages
from tawpipe.errors import UserError
from tawpipe.report.page import PLOTLY
from tawpipe.report.site import Site
from tawpipe.train.lock import running_in

pytest.importorskip("plotly")
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "2026-11-25-links"


def row(step: int) -> str:
    return json.dumps({"step": step, "loss": 3 - step / 10, "seconds": 0.5, "tokens_per_second": 100.0}) + "\n"


@pytest.fixture
def folder(tmp_path) -> Path:
    run = tmp_path / "run7"
    run.mkdir()
    (run / "metrics.jsonl").write_text(row(1) + row(2))
    (run / "config.yaml").write_text("model: tiny\nsteps: 9\n")
    return run


def get(site: Site, name: str, **headers: str) -> str:
    with urllib.request.urlopen(urllib.request.Request(site.address + name, headers=headers)) as answer:
        return answer.read().decode()


def status(site: Site, name: str, **headers: str) -> int:
    with pytest.raises(urllib.error.HTTPError) as error:
        get(site, name, **headers)
    with error.value:
        check_page_text(error.value.read().decode())
        return error.value.code


def test_page_of_a_running_run_is_read_anew_at_every_request(folder):
    with served(find_pages(folder)) as site:
        index = get(site, "")
        assert len(get(site, PLOTLY)) > 2**20
        check_page_text(index)
        assert 'href="run.html"' in index and "every step so far" in index
        before = get(site, "run.html")
        check_page_text(before)
        assert "2 of 9" in before and 'href="index.html"' in before
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(row(3) + '{"step": 4, "lo')  # a row that is being written
        after = get(site, "run.html?again")
        assert "3 of 9" in after and "Damaged" not in after


def test_server_answers_only_this_machine_and_only_its_pages(folder):
    with served(find_pages(folder)) as site:
        assert site.server_address[0] == "127.0.0.1"
        for name in ("other.html", "../run7/config.yaml", "config.yaml", "%2e%2e/x", "/etc/passwd"):
            assert status(site, name) == 404, name
        assert status(site, "", Host="example.org") == 403
        assert get(site, "", Host="localhost:1") == get(site, "")


def test_metrics_lines_that_are_not_rows_are_listed_on_the_page(folder):
    (folder / "metrics.jsonl").write_text(row(1) + "oops\n" + row(2) + "[3]\n")
    text = find_pages(folder)[0].make()
    assert "2 lines that are no rows of numbers (2, 4)" in text and "2 of 9" in text


def test_run_without_valid_metrics_fails_and_other_pages_are_served(folder):
    (folder / "metrics.jsonl").write_text("oops\n")
    (folder / "old.html").write_text("<!doctype html><p>old</p>")
    with served(find_pages(folder)) as site:
        assert status(site, "run.html") == 500
        assert "old" in get(site, "old.html")
    with pytest.raises(UserError, match=r"metrics\.jsonl.*`step`"):
        find_pages(folder)[0].make()


def test_empty_metrics_file_is_shown_as_a_run_without_steps(folder):
    (folder / "metrics.jsonl").write_text("")
    assert "none yet" in find_pages(folder)[0].make()


def test_run_page_says_whether_the_run_goes_on(folder, tmp_path):
    """Only a held lock is called running; a served page renews itself while the run may write, a written one never."""
    page, renews = find_pages(folder)[0], '<meta name="renew"'
    with served([page]) as site, running_in(folder):
        text = get(site, "run.html")
        assert "Running: step 2 of 9, last written " in text and renews in text and "connect-src 'self'" in text
        assert main(["open", str(folder), "--out", str(tmp_path / "site")]) == 0
        written = (tmp_path / "site" / "run.html").read_text()
        assert "Running: step 2 of 9" in written and renews not in written
    with served([page]) as site:
        text = get(site, "run.html")  # perhaps on a machine whose locks are not seen here
        assert "Not running on this machine: step 2 of 9, last written " in text and renews in text
        os.utime(folder / "metrics.jsonl", (0, 0))
        text = get(site, "run.html")
        assert "Not running on this machine: step 2 of 9, last written " in text
        assert renews not in text and "connect-src" not in text
        (folder / "metrics.jsonl").write_text(row(9))
        text = get(site, "run.html")
        assert "All steps done: step 9 of 9, last written " in text and renews not in text


def test_lab_results_are_written_as_pages(capsys, tmp_path):
    assert main(["open", str(RESULTS), "--out", str(tmp_path / "site")]) == 0
    assert {path.name for path in (tmp_path / "site").iterdir()} == {"index.html", "compare.html", PLOTLY}
    for path in (tmp_path / "site").glob("*.html"):
        check_page_text(path.read_text())
    assert "physical bound" in (tmp_path / "site" / "compare.html").read_text()
    assert "wrote" in capsys.readouterr().out


def test_damaged_results_are_named(tmp_path):
    (tmp_path / "results.json").write_text('{"rows": []}')
    with pytest.raises(UserError, match=r"results\.json.*lab compare"):
        find_pages(tmp_path)[0].make()


def test_existing_page_is_listed_beside_the_generated_page(folder):
    (folder / "run.html").write_text("written before")
    pages = {page.name: page for page in find_pages(folder)}
    assert set(pages) == {"run.html", "written-run.html"}
    assert pages["written-run.html"].make() == "written before"


def test_pages_can_be_written_into_the_same_folder_again(folder):
    for _ in range(2):
        assert main(["open", str(folder), "--out", str(folder)]) == 0
    assert {path.name for path in folder.glob("*.html")} == {"index.html", "run.html"}


@pytest.mark.parametrize("what", ["nowhere", "empty", "a file"])
def test_a_path_without_pages_is_refused(tmp_path, capsys, what):
    path = tmp_path / "x"
    if what == "empty":
        path.mkdir()
    elif what == "a file":
        path.write_text("x")
    assert main(["open", str(path)]) == 2
    said = capsys.readouterr().err
    assert f"PATH: got '{path}'" in said and "the output folder of a run" in said


@pytest.mark.parametrize("port", ["70000", "-1"])
def test_invalid_port_is_refused(folder, capsys, port):
    assert main(["open", str(folder), "--port", port]) == 2
    assert "--port" in capsys.readouterr().err


def test_a_port_in_use_is_named(folder, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main(["open", str(folder), "--port", str(taken.getsockname()[1])]) == 2
    assert "it is in use" in capsys.readouterr().err


def test_unwritable_output_folder_is_named(folder, capsys):
    assert main(["open", str(folder), "--out", str(folder / "config.yaml")]) == 2
    assert "--out" in capsys.readouterr().err


def test_browser_opens_only_on_a_display(folder, monkeypatch):
    opened = []
    monkeypatch.setattr(command.webbrowser, "open", opened.append)
    monkeypatch.setattr(Site, "serve_forever", lambda _: None)
    monkeypatch.setattr(command, "has_display", lambda: True)
    assert main(["open", str(folder), "--no-browser"]) == 0 and not opened
    assert main(["open", str(folder)]) == 0
    assert opened and opened[0].endswith("/run.html")  # one page needs no list
    monkeypatch.setattr(command, "has_display", lambda: False)
    assert main(["open", str(folder)]) == 0 and len(opened) == 1


INTERRUPTIBLE = """
import signal, sys
from tawpipe.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background may have been told to ignore it
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_ctrl_c_ends_the_server_without_an_error(folder):
    words = [sys.executable, "-c", INTERRUPTIBLE, "open", str(folder), "--no-browser"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        try:
            said = [process.stdout.readline(), process.stdout.readline()]
            assert said[0].startswith("Run: ") and said[1].startswith("http://127.0.0.1:")
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=60) == 0
            assert process.stderr.read() == ""
        finally:
            process.kill()
