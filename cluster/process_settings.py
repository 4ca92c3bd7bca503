"""What every process of a cluster is told of the others: its private folder, Redis, and the secrets' files."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field


class ProcessSettings(BaseModel):
    """The same flags of workers and routers. Secrets are in files with mode 0600, never in a setting."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    runtime_dir: Path = Field(description="private directory (0700) for sockets of this cluster")
    redis_url: str = ""
    redis_password_file: Path | None = None
    cluster_token_file: Path | None = None
    tls_authority_file: Path | None = Field(default=None, description="PEM; needed where gRPC leaves the machine")
    tls_certificate_file: Path | None = Field(default=None, description="PEM; this process, signed by the authority")
    tls_key_file: Path | None = Field(default=None, description="PEM; the certificate's key")
    tls_server_name: str = Field(
        default="", description="what peers' certificates name, for one that all share; empty: their address"
    )
