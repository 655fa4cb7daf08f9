"""The ``pgs`` command and its sub-commands."""

from __future__ import annotations

import typer

from palingenesis.cli.config import config
from palingenesis.cli.demo import demo
from palingenesis.cli.diagnose import diagnose
from palingenesis.cli.explain import explain
from palingenesis.cli.inspect import inspect
from palingenesis.cli.loss import loss
from palingenesis.cli.monitor import monitor
from palingenesis.cli.overrides import TAKES_OVERRIDES
from palingenesis.cli.profile import profile
from palingenesis.cli.report import report
from palingenesis.cli.sync import sync
from palingenesis.cli.train import train
from palingenesis.cli.validate import validate
from palingenesis.cli.verify import verify
from palingenesis.cli.version import version


def _same_with_underscores(word: str) -> str:
    """``--num-steps`` and ``--num_steps`` are one option, ``no-gradient`` and ``no_gradient`` one value."""
    return word.replace("-", "_")


app = typer.Typer(
    name="pgs",
    help="Watch PyTorch training layer by layer; read, check and show what was recorded.",
    no_args_is_help=True,
    add_completion=False,
    # Plain help: laying it out with rich would cost more than everything else that `--help` does.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"token_normalize_func": _same_with_underscores, "help_option_names": ["-h", "--help"]},
)

for _command in (monitor, loss, report, verify, sync, explain, demo, version):
    app.command()(_command)

# Those with --config take --section.key value as well.
for _configured in (train, diagnose, profile, inspect, validate, config):
    app.command(context_settings=TAKES_OVERRIDES)(_configured)
