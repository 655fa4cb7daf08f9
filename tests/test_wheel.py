"""The built wheel holds everything, and runs in an environment that never saw the source tree."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "palingenesis"

pytestmark = pytest.mark.slow

TRAINING = """
import torch
from palingenesis import Monitor

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with Monitor(model, optimizer, check_every=2) as mon:
    for _ in range(40):
        optimizer.zero_grad()
        loss = model(torch.randn(16, 4)).square().mean()
        loss.backward()
        mon.step(loss)
        optimizer.step()
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    # The build backend is already here: an isolated build would fetch it again, and needs a network.
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT))
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def scripts(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripts folder of a new environment with the wheel in it, and our dependencies in view."""
    home = tmp_path_factory.mktemp("clean") / "env"
    venv.create(home, with_pip=False)
    variables = {"base": str(home), "platbase": str(home)}
    site = Path(sysconfig.get_path("purelib", "venv", variables))
    run(sys.executable, "-m", "pip", "--python", str(home), "install", "--no-deps", "--no-index", str(wheel))
    # Added after the environment's own packages, so the wheel wins over the source tree's editable install.
    (site / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return Path(sysconfig.get_path("scripts", "venv", variables))


def run(*command: str, cwd: Path | None = None) -> str:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, env=env)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout


def test_the_wheel_holds_every_file_of_the_package(wheel: Path) -> None:
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("palingenesis/")}
    wanted = {
        path.relative_to(PACKAGE.parent).as_posix()
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }

    assert inside == wanted
    assert "palingenesis/py.typed" in inside
    assert {f"palingenesis/report/templates/report.{kind}" for kind in ("html", "css", "js")} <= inside


def test_the_wheel_says_what_it_needs(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    about = Parser().parsestr(archive.read(name).decode("utf-8"))

    assert about["License-Expression"] == "Apache-2.0"
    assert "torch>=2.6" in about.get_all("Requires-Dist", [])
    assert {"sft", "lightning", "demo", "dev"} <= set(about.get_all("Provides-Extra", []))


def test_the_installed_command_answers(scripts: Path, tmp_path: Path) -> None:
    python = str(scripts / "python")
    where = run(python, "-c", "import palingenesis; print(palingenesis.__file__)", cwd=tmp_path)

    assert Path(where.strip()).is_relative_to(scripts.parent)
    assert "0.1.0" in run(str(scripts / "pgs"), "version", cwd=tmp_path)
    assert "report" in run(python, "-m", "palingenesis", "--help", cwd=tmp_path)


def test_the_installed_package_monitors_and_reports(scripts: Path, tmp_path: Path) -> None:
    run(str(scripts / "python"), "-c", TRAINING, cwd=tmp_path)

    assert "HEALTHY" in run(str(scripts / "pgs"), "report", "pgs_run", "--format", "text", cwd=tmp_path)
    run(str(scripts / "pgs"), "verify", "pgs_run", cwd=tmp_path)
    assert "HEALTHY" in (tmp_path / "pgs_run" / "report.html").read_text("utf-8")
