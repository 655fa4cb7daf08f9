"""The command line as a shell and a script meet it: exit codes, one-line errors, one JSON document."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tests.record.runs import alarm, record

from palingenesis.cli import main
from palingenesis.errors import MissingExtraError

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def healthy(tmp_path: Path) -> Path:
    return record(tmp_path / "healthy")


@pytest.fixture
def alarmed(tmp_path: Path) -> Path:
    return record(tmp_path / "alarmed", alarm(100))


@pytest.fixture
def fake_report(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The report's three functions, so that this file tests the command and not the report."""
    module = ModuleType("palingenesis.report")

    def write_html(run: Any, path: Path) -> Path:
        path.write_text(f"<html>{run.verdict}</html>")
        return path

    module.write_html = write_html  # type: ignore[attr-defined]
    module.render_text = lambda run, width=80: f"text of {run.verdict}\n"  # type: ignore[attr-defined]
    module.to_json = lambda run: {"verdict": run.verdict, "x": float("nan")}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "palingenesis.report", module)
    return module


def shell(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "palingenesis", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, **options)


def one_line(text: str) -> str:
    assert text.count("\n") == 1, text
    return text


# ---------------------------------------------------------------------- verify


def test_verify_says_intact_and_exits_0(healthy: Path) -> None:
    done = shell("verify", healthy)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (
        "intact: 1 event, each as it was written (metrics and layers are not covered: the run has no end)\n"
    )


def test_verify_names_the_line_and_exits_1(alarmed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = alarmed / "events.jsonl"
    events.write_bytes(events.read_bytes().replace(b"-4.5", b"-4.6"))
    assert main(["verify", str(alarmed)]) == 1
    assert one_line(capsys.readouterr().out).startswith("not intact: line 2 was altered")
    assert main(["verify", str(alarmed), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert {key: document[key] for key in ("ok", "line", "events")} == {"ok": False, "line": 2, "events": 1}


@pytest.mark.parametrize("arguments", [["verify"], ["verify", "--json"], ["report"], ["report", "--json"]])
def test_a_missing_run_is_one_line_and_exits_2(
    tmp_path: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, str(tmp_path / "nothing")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    told = {"verify": "no run folder at", "report": "there is no"}[arguments[0]]
    assert one_line(captured.err).startswith(f"pgs: error: {told} {tmp_path / 'nothing'}")


# ---------------------------------------------------------------------- report


@pytest.mark.usefixtures("fake_report")
def test_report_writes_a_page_and_says_the_verdict(healthy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(healthy)]) == 0
    verdict, path = capsys.readouterr().out.splitlines()
    assert verdict.startswith("HEALTHY: ")
    assert path == f"report: {healthy / 'report.html'}"
    assert (healthy / "report.html").read_text() == "<html>HEALTHY</html>"


@pytest.mark.usefixtures("fake_report")
def test_report_of_a_run_that_is_not_healthy_exits_1(
    alarmed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(alarmed), "--format", "text"]) == 1
    assert capsys.readouterr().out == "text of WARNING\n"
    for arguments in (["--format", "json"], ["--json"], ["--format=json"]):
        assert main(["report", str(alarmed), *arguments]) == 1
        assert json.loads(capsys.readouterr().out) == {"verdict": "WARNING", "x": "NaN"}


@pytest.mark.usefixtures("fake_report")
def test_report_goes_to_a_file(alarmed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "r.json"
    assert main(["report", str(alarmed), "--format", "json", "--out", str(out)]) == 1
    assert json.loads(out.read_text()) == {"verdict": "WARNING", "x": "NaN"}
    assert "WARNING: step 100: blocks.0 is vanishing" in capsys.readouterr().out
    assert main(["report", str(alarmed), "--out", str(tmp_path / "no" / "r.html")]) == 2
    assert "the report cannot be written to" in one_line(capsys.readouterr().err)


# ---------------------------------------------------------------------- demo


def test_demo_passes_its_options_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import palingenesis.demo as demo

    asked: list[Any] = []
    run = demo.DemoRun(tmp_path, tmp_path / "report.html", "HEALTHY", None, 7.0, 5.0, 1.0)

    def run_demo(out: Path, **options: Any) -> demo.DemoResult:
        asked.append((out, options))
        return demo.DemoResult(options["steps"], options["seed"], options["fault"], 100, "layer", run, None)

    monkeypatch.setattr(demo, "run_demo", run_demo, raising=False)
    assert main(["demo", "--out", str(tmp_path), "--steps", "300", "--fault", "no-gradient", "--json"]) == 0
    assert asked == [(tmp_path, {"steps": 300, "seed": 0, "fault": "no_gradient", "console": None})]
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] is True
    assert document["healthy"]["verdict"] == "HEALTHY"


def test_a_missing_extra_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import palingenesis.demo as demo

    def run_demo(*_: Any, **__: Any) -> None:
        raise MissingExtraError("the demo needs transformers:\n pip install 'palingenesis[demo]'")

    monkeypatch.setattr(demo, "run_demo", run_demo, raising=False)
    assert main(["demo"]) == 2
    assert one_line(capsys.readouterr().err) == (
        "pgs: error: the demo needs transformers: pip install 'palingenesis[demo]'\n"
    )


# ---------------------------------------------------------------------- usage


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["verfy", "x"], "No such command 'verfy'. Did you mean 'verify'?"),
        (["report", "--formt", "text", "x"], "No such option: --formt. Did you mean --format?"),
        (["report", "--format", "pdf", "x"], "'pdf' is not one of 'html', 'text', 'json'"),
        (["demo", "--steps", "many"], "'--steps'"),
        (["verify"], "Missing argument 'RUN'"),
        (["verify", "a", "b"], "unexpected extra argument"),
        (["--nonsense"], "No such option: --nonsense"),
    ],
)
def test_wrong_usage_is_one_line_and_exits_2(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    line = one_line(captured.err)
    assert line.startswith("pgs: error: ")
    assert told in line


def test_without_a_command_the_help_is_shown_and_exits_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "Usage: pgs" in capsys.readouterr().err


def test_hyphens_and_underscores_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    import typer

    from palingenesis.cli import entry
    from palingenesis.cli.app import app

    seen = []

    def spaced(log_file: str = "", num_samples: int = 1) -> int:
        seen.append((log_file, num_samples))
        return 0

    other = typer.Typer(context_settings=app.info.context_settings, rich_markup_mode=None)
    other.command("first")(lambda: 0)
    other.command("second-word")(spaced)
    monkeypatch.setattr(entry, "app", other)
    assert main(["second-word", "--log_file", "a", "--num-samples=2"]) == 0
    assert main(["second-word", "--log-file", "b", "--num_samples", "3"]) == 0
    assert seen == [("a", 2), ("b", 3)]


def test_version_as_text_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    import palingenesis

    assert main(["version"]) == 0
    assert capsys.readouterr().out.startswith(f"palingenesis {palingenesis.__version__}\n")
    assert main(["version", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["palingenesis"] == palingenesis.__version__


def test_an_error_in_the_program_itself_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    from palingenesis.cli import entry

    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(entry, "get_command", lambda _: SimpleNamespace(main=broken))
    with pytest.raises(ZeroDivisionError):
        main(["version"])


# ---------------------------------------------------------------------- processes


def test_help_is_quick_and_imports_no_torch_numpy_or_rich() -> None:
    program = """
import sys, time
sys.argv = ["pgs", "--help"]
from palingenesis.cli import main
assert main() == 0
heavy = {"torch", "numpy", "rich", "pydantic", "transformers"} & set(sys.modules)
sys.exit(f"{heavy} in {time.process_time()} s" if heavy or time.process_time() > 0.5 else 0)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for command in ("report", "verify", "demo", "version"):
        assert command in done.stdout


def test_the_package_imports_neither_torch_nor_numpy_nor_pydantic() -> None:
    program = """
import sys, palingenesis
assert not {"torch", "numpy", "pydantic"} & set(sys.modules)
assert set(palingenesis.__all__) <= set(dir(palingenesis))
for name in ("__version__", "load_run", "MonitorConfig", "Event"):
    assert getattr(palingenesis, name)
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="pipes end differently there")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_closed_pipe_is_quiet(unbuffered: str) -> None:
    program = "import sys; sys.stdin.read(); from palingenesis.cli import main; sys.exit(main())"
    with subprocess.Popen(
        [sys.executable, "-c", program, "version"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        process.stdin.close()
        errors = process.stderr.read()
    assert (process.returncode, errors) == (141, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("command", ["report --format text", "report --json", "verify", "--help"])
def test_output_that_cannot_be_written_is_not_blamed_on_the_run(
    healthy: Path, command: str, unbuffered: str
) -> None:
    run = [] if command == "--help" else [healthy]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "palingenesis", *command.split(), *run],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )
    assert done.returncode == 2
    assert one_line(done.stderr).startswith("pgs: error: the output could not be written: No space left")
    assert str(healthy) not in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_an_out_that_cannot_be_written_is_named(healthy: Path) -> None:
    done = shell("report", healthy, "--format", "text", "--out", "/dev/full")
    assert done.returncode == 2
    assert one_line(done.stderr).startswith("pgs: error: the report cannot be written to /dev/full: No space")


def test_names_in_any_script_reach_an_ascii_terminal(tmp_path: Path) -> None:
    folder = record(tmp_path / "блок", alarm(100))
    (folder / "events.jsonl").unlink()
    done = shell("verify", tmp_path / "нет", env={"PATH": "", "PYTHONIOENCODING": "ascii"})
    assert done.returncode == 2
    assert one_line(done.stderr).startswith("pgs: error: no run folder at")
