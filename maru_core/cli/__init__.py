"""The command ``maru``."""

from __future__ import annotations

import click

from maru_core import __version__, logs
from maru_core.cli.admin import admin
from maru_core.cli.doctor import doctor
from maru_core.cli.keygen import keygen
from maru_core.cli.plugins import plugins
from maru_core.cli.serve import serve
from maru_core.cli.status import status


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="maru")
def main() -> None:
    """Maru shares the KV cache of LLM engines. Settings come from options, then from MARU_* variables."""
    # On stderr from the first line on: stdout is for results, such as JSON.
    logs.setup("warning")


main.add_command(serve)
main.add_command(status)
main.add_command(plugins)
main.add_command(doctor)
main.add_command(keygen)
main.add_command(admin)

__all__ = ["main"]
