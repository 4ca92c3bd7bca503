"""Every flag of a command as a variable of the environment too: `--grpc-port` is TANDEM_GRPC_PORT, as containers want.

A flag goes before its variable, that before the cluster's file, that before the default. An empty variable is none; a
flag that may be repeated takes several values with spaces between. `--help` names each, and an error about a value
names the variable that it came from; passwords stand in neither.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import typer
from typer.core import TyperCommand

PREFIX = "TANDEM"
SETTINGS = {"auto_envvar_prefix": PREFIX}
# Read elsewhere: where files lie, and what clients of a cluster use.
OTHER_VARIABLES = frozenset(
    {
        "TANDEM_HOME", "TANDEM_RUNTIME_DIR",
        "TANDEM_URL", "TANDEM_API_KEY", "TANDEM_CA_FILE", "TANDEM_CERT_FILE", "TANDEM_KEY_FILE",
    }
)  # fmt: skip
# What Kubernetes puts into every pod for each Service, here for one whose name begins with "tandem".
_OF_A_SERVICE = re.compile(r"TANDEM(_[A-Z0-9_]+)?_(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT_\d+_(TCP|UDP|SCTP).*)")
_ADDRESS_OF_A_SERVICE = re.compile(r"(tcp|udp|sctp)://")


class EnvironmentCommand(TyperCommand):
    """Says of a wrong value that it came from the environment, and reports variables that nothing reads."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # a context of typer's own, or of click's
        try:
            rest = super().parse_args(ctx, args)
        except typer.BadParameter as error:
            name = "" if error.param is None else error.param.name or ""
            if is_from_environment(ctx, name):
                error.param_hint = variable_of(name)
                error.message += _hint_about_services(os.environ.get(variable_of(name), ""))
            raise
        known = {variable_of(name) for parameter in self.params if (name := parameter.name)}
        for line in unknown_variables(os.environ, known):
            typer.echo(f"tandem: {line}", err=True)
        return rest


def variable_of(name: str) -> str:
    """The variable of a flag by the flag's name with underscores."""
    return f"{PREFIX}_{name.upper()}"


def is_from_environment(context: typer.Context, name: str) -> bool:
    """Whether the flag's value is its variable's."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "ENVIRONMENT"


def variables_in_use(context: typer.Context) -> dict[str, str]:
    """Flag -> variable, of those flags that have their value from the environment."""
    return {name: variable_of(name) for name in context.params if is_from_environment(context, name)}


def unknown_variables(environment: Mapping[str, str], known: Iterable[str]) -> Sequence[str]:
    """A line for each variable that looks like a setting and is none."""
    names = {*known, *OTHER_VARIABLES}
    lines = []
    for name in sorted(environment):
        if not name.startswith(f"{PREFIX}_") or name in names or _OF_A_SERVICE.fullmatch(name):
            continue
        if name.endswith("_PORT") and _ADDRESS_OF_A_SERVICE.match(environment[name]):
            continue
        close = difflib.get_close_matches(name, names, n=1)
        meant = f": did you mean {close[0]}?" if close else ""
        lines.append(f"{name} in the environment sets nothing{meant}")
    return lines


def _hint_about_services(value: str) -> str:
    if not _ADDRESS_OF_A_SERVICE.match(value):
        return ""
    return " Kubernetes sets it for a Service of that name: give the flag, or enableServiceLinks: false in the pod."
