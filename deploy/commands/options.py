"""Options that several commands share, and the exit statuses of all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

DEFAULT_URL = "http://127.0.0.1:8000"
EXIT_FAILED, EXIT_CANNOT_START, EXIT_INTERRUPTED = 1, 2, 130

Config = Annotated[
    Path | None, typer.Option(help="YAML that describes the cluster; default: deploy/clusters/laptop.yaml")
]
Url = Annotated[str, typer.Option(help="where the cluster answers", envvar="TANDEM_URL")]
ApiKey = Annotated[str, typer.Option(help="for a cluster with API keys", envvar="TANDEM_API_KEY", show_default=False)]
CaFile = Annotated[
    Path | None,
    typer.Option(
        help="PEM: who signed the certificate of an https URL, or that certificate",
        envvar="TANDEM_CA_FILE",
        show_default=False,
    ),
]
CertFile = Annotated[
    Path | None,
    typer.Option(help="PEM: our own, for a front that asks for one", envvar="TANDEM_CERT_FILE", show_default=False),
]
KeyFile = Annotated[Path | None, typer.Option(help="PEM: its key", envvar="TANDEM_KEY_FILE", show_default=False)]
OnRay = Annotated[
    Literal["ray"] | None, typer.Option("--on", help="ray: on a Ray cluster, as actors; the only place there is so far")
]
Address = Annotated[str, typer.Option(help="of a Ray cluster; empty: one on this machine, of our own")]
